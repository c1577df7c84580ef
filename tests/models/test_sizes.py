"""Sizes: config.json's, or what transformers takes where it is silent, and expressions of them."""

import pytest
from transformers import AutoConfig

from nvfp4cli.errors import CheckpointError
from nvfp4cli.models import spec as specs
from nvfp4cli.models.sizes import Sizes, is_axis

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_are_those_of_transformers(model_type):
    config = AutoConfig.for_model(model_type)
    given = {key: getattr(config, key) for key in ("hidden_size", "num_attention_heads")}
    found = Sizes(given, specs.load(model_type).defaults).completed()
    heads = config.hidden_size // config.num_attention_heads
    assert found == {
        **given,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", heads),
    }


def test_config_json_wins_over_a_default_and_null_does_not():
    assert Sizes({"a": 3}, {"a": 4})["a"] == 3
    assert Sizes({"a": None, "b": 6}, {"a": "b // b"})["a"] == 1


def test_expressions_are_computed_from_left_to_right():
    sizes = Sizes({"a": 7, "b": 2, "c": 5}, {})
    assert sizes.of("a // b * c") == 15
    assert sizes.explained("a // b * c") == "a // b * c is 7 // 2 * 5 = 15 in config.json"
    assert sizes.explained("at least a") == "a is 7 in config.json"
    sizes = Sizes({"a": 7}, {"b": 2})
    assert sizes.explained("a * b") == "a * b is 7 * 2 = 14 in config.json (b by default)"


@pytest.mark.parametrize(("length", "exact", "at_least"), [(6, False, False), (7, True, True),
                                                           (8, False, True)])  # fmt: skip
def test_lengths(length, exact, at_least):
    sizes = Sizes({"a": 7}, {})
    assert sizes.fits("a", length) is exact
    assert sizes.fits("at least a", length) is at_least


def test_what_an_axis_may_be():
    assert is_axis("at least vocab_size")
    assert is_axis("a * b // c")
    wrong = ("", "a *", "a / b", "a ** b", "-a", "f(a)", "at most a", "a b", 64, None)
    assert not any(map(is_axis, wrong))


@pytest.mark.parametrize("value", [0, -1, 1.5, "7", True, []])
def test_a_size_that_is_none(value):
    with pytest.raises(CheckpointError, match=r"^a is .* in config\.json: write a positive"):
        Sizes({"a": value}, {"a": 4})["a"]


def test_a_size_that_is_nowhere():
    with pytest.raises(CheckpointError, match=r"config\.json has no b: add it"):
        Sizes({}, {"a": "b // b"})["a"]
    with pytest.raises(CheckpointError, match=r"config\.json has no a: add it"):
        Sizes({}, {"a": "a"})["a"]  # no endless search
