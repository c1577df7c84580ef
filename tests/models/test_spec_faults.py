"""Faults of a spec, and of a config.json held against one: each is refused, in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.models import document
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import Claim, claim
from nvfp4cli.models.layers import added
from nvfp4cli.models.pieces import pieces
from nvfp4cli.models.sizes import Sizes, is_divisor, is_expression
from nvfp4cli.recipe import LAYOUT_NAMES, ROTATIONS

NEXTN = "num_nextn_predict_layers"


def names_of(spec: specs.ArchSpec, layers: range, experts: int, **choice: str) -> list[str]:
    """Tensors of some layers, and of what is in no layer; choice: the variant of a group."""
    found = []
    for module in spec.modules:
        if module.optional or any(
            choice.get(g, v) != v for g, v in [module.variant[:2] or ("", "")]
        ):
            continue
        if module.variant[-1:] == ("together",) or module.mtp:
            continue
        for layer in layers if "{layer}" in module.pattern else [0]:
            for expert in range(experts) if "{expert}" in module.pattern else [0]:
                name = module.pattern.replace("{layer}", str(layer))
                suffix = module.suffixes.weight or ""
                found.append(name.replace("{expert}", str(expert)) + suffix)
    return list(dict.fromkeys(found))


GLM = specs.load("glm4_moe")
GLM_CONFIG: dict[str, Any] = {"num_hidden_layers": 2, "n_routed_experts": 3, NEXTN: 1}


def layer_behind(number: int) -> list[str]:
    own = [m.pattern.replace("{layer}", str(number)) + ".weight" for m in added(GLM)]
    whole = names_of(GLM, range(number, number + 1), 3, mlp="sparse")
    return own + [name for name in whole if f"layers.{number}." in name]


def glm(layers: int, *behind: int) -> list[str]:
    main = names_of(GLM, range(layers), 3, mlp="sparse")
    return [*main, *(name for number in behind for name in layer_behind(number))]


# --- layers behind num_hidden_layers ---


def test_layers_behind_the_decoder_are_those_that_config_json_counts():
    found = claim(GLM, glm(2, 2), GLM_CONFIG)
    assert {one.layer for one in found.values() if one and one.mtp} == {2}
    assert not any(one.mtp for one in claim(GLM, glm(2), GLM_CONFIG).values() if one)
    silent = {key: value for key, value in GLM_CONFIG.items() if key != NEXTN}
    assert {c.layer for c in claim(GLM, glm(2, 2, 3), silent).values() if c and c.mtp} == {2, 3}


@pytest.mark.parametrize(
    ("names", "config", "sentence"),
    [
        (glm(3, 3), {}, rf"num_hidden_layers is 2 and {NEXTN} is 1 .* layers 2, 3 behind"),
        (glm(2, 3), {}, rf"num_hidden_layers is 2 and {NEXTN} is 1 .* layer 3 behind"),
        (glm(2, 2), {NEXTN: 0}, rf"num_hidden_layers is 2 and {NEXTN} is 0 .* layer 2 behind"),
        (glm(2, 2), {"num_hidden_layers": 3}, r"layers is 3 .*model\.layers\.2\.enorm\.weight"),
        (glm(3), {}, r"lacks model\.layers\.2\.enorm\.weight.*layer 2 predicts further tokens"),
        (glm(3), {NEXTN: None}, r"layers is 2 in .* also holds model\.layers\.2\."),
        (glm(3, 3), {NEXTN: None}, r"layers is 2 in .* also holds model\.layers\.2\."),
    ],
)
def test_a_wrong_number_of_layers_is_no_layer_behind(names, config, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        claim(GLM, names, {**GLM_CONFIG, **config})


@pytest.mark.parametrize("part", ["eh_proj", "mlp.experts.1.up_proj", "self_attn.o_proj"])
@pytest.mark.parametrize("count", [1, None])
def test_a_layer_behind_is_complete(part, count):
    names = [name for name in glm(2, 2) if f"layers.2.{part}" not in name]
    with pytest.raises(UnsupportedError, match=r"model\.layers\.2\."):
        claim(GLM, names, {**GLM_CONFIG, NEXTN: count})


@pytest.mark.parametrize("count", [-1, True, "1", 1.0])
def test_the_count_of_layers_behind_is_a_whole_number(count):
    with pytest.raises(CheckpointError, match=f"{NEXTN} is .* write a whole number"):
        claim(GLM, glm(2, 2), {**GLM_CONFIG, NEXTN: count})


def test_a_block_beside_the_decoder_makes_no_layers_behind_it():
    spec = specs.load("qwen3_5_text")
    names = names_of(spec, range(3), 1, mixer="attention")
    with pytest.raises(UnsupportedError, match=r"layers is 2 in .* also holds model\.layers\.2\."):
        claim(spec, [*names, "mtp.fc.weight"], {"num_hidden_layers": 2})


# --- experts ---


def test_an_expert_too_many_is_refused():
    more = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(
        UnsupportedError, match=f"^n_routed_experts is 3 in config.json, .* also holds {more}: "
    ):
        claim(GLM, [*glm(2), more], GLM_CONFIG)


@pytest.mark.parametrize(
    ("model_type", "config", "fact"),
    [
        ("glm4_moe", {"n_routed_experts": 4}, "n_routed_experts is 4 in config.json"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_local_experts is 4 in config.json"),
        ("qwen3_moe", {}, r"num_experts is 128 in config.json \(num_experts by default\)"),
    ],
)
def test_experts_too_few_are_counted(model_type, config, fact):
    spec = specs.load(model_type)
    names = names_of(spec, range(2), 3, mlp="sparse")
    with pytest.raises(UnsupportedError, match=rf"lacks .*experts\.3\..* and {fact}: complete"):
        claim(spec, names, {"num_hidden_layers": 2, **config})


def test_a_size_is_explained_by_the_entry_that_gives_it():
    sizes = GLM.sizes({"n_routed_experts": 5, "num_experts": 7, "hidden_size": 8})
    explained = sizes.explained("num_experts * hidden_size")
    assert explained.startswith("num_experts * hidden_size is 5 * 8 = 40 in config.json (")
    assert explained.endswith("(num_experts by n_routed_experts)")


def test_rows_are_a_multiple_of_the_names():
    module = next(m for m in GLM.modules if m.pattern.endswith("experts.gate_up_proj"))
    one = Claim("t", "t", "weight", module, 0)
    assert [piece.rows for piece in pieces(one, (1, 96, 8))] == [48, 48]
    with pytest.raises(CheckpointError, match=r"t has shape \[1, 97, 8\], whose 97 rows .* the 2 "):
        next(pieces(one, (1, 97, 8)))


# --- what a model class does not read ---

STRAY = {
    "gpt2": ({"n_head": 4, "n_embd": 64}, {"num_key_value_heads": 4, "head_dim": 16}),
    "opt": (
        {"num_attention_heads": 4, "hidden_size": 64}, {"num_key_value_heads": 4, "head_dim": 16},
    ),
    "stablelm": ({"num_attention_heads": 4, "hidden_size": 64}, {"head_dim": 16}),
    "qwen2_vl_text": ({"num_attention_heads": 4, "hidden_size": 64}, {"head_dim": 16}),
    "qwen2_5_vl_text": ({"num_attention_heads": 4, "hidden_size": 64}, {"head_dim": 16}),
    "deepseek_v2": ({"n_routed_experts": 4}, {"num_experts": 4}),
    "deepseek_v3": ({"n_routed_experts": 4}, {"num_experts": 4}),
    "glm4_moe": ({"n_routed_experts": 4}, {"num_experts": 4}),
    "qwen2_moe": ({}, {"num_experts": 60}),
}  # fmt: skip


@pytest.mark.parametrize("model_type", STRAY)
def test_entries_that_the_model_class_does_not_know_are_not_read(model_type):
    config, derived = STRAY[model_type]
    sizes = specs.load(model_type).sizes({**config, **dict.fromkeys(derived, 2)} if config else
                                         {"num_local_experts": 2})  # fmt: skip
    assert {name: sizes[name] for name in derived} == derived


def test_the_last_of_extended_specs_says_whether_a_size_is_derived(tmp_path):
    spec = written(tmp_path, extends="gpt2", defaults={"head_dim": 4})
    assert spec.sizes({"head_dim": 8})["head_dim"] == 8
    assert spec.sizes({})["head_dim"] == 4
    assert spec.sizes({"num_key_value_heads": 8})["num_key_value_heads"] == 12
    spec = written(tmp_path, extends="llama", derived={"head_dim": 4})
    assert spec.sizes({"head_dim": 8})["head_dim"] == 4


# --- models that a spec does not describe ---


@pytest.mark.parametrize(
    ("model_type", "flag", "value"),
    [
        ("stablelm", "use_parallel_residual", True),
        ("opt", "do_layer_norm_before", False),
        ("opt", "layer_norm_elementwise_affine", False),
    ],
)
def test_a_model_of_another_kind_is_refused_by_its_flag(model_type, flag, value):
    spec = specs.load(model_type)
    said = f"^{flag} is {str(value).lower()} in config.json, which the spec of {model_type} does"
    with pytest.raises(UnsupportedError, match=said):
        claim(spec, [], {"num_hidden_layers": 1, flag: value})
    with pytest.raises(UnsupportedError, match="lacks"):
        claim(spec, [], {"num_hidden_layers": 1, flag: not value})


@pytest.mark.parametrize(("width", "other"), [(512, True), (1024, False), (None, False)])
def test_a_size_that_must_be_another_one_is_refused(width, other):
    config = {"num_hidden_layers": 1, "hidden_size": 1024, "word_embed_proj_dim": width}
    said = "^word_embed_proj_dim is 512 in config.json, which" if other else "lacks"
    with pytest.raises(UnsupportedError, match=said):
        claim(specs.load("opt"), [], config)


# --- model_type ---


@pytest.mark.parametrize(
    "config",
    [{"model_type": ["a"]}, {"model_type": "llava", "text_config": {"model_type": ["a"]}}],
)
def test_a_model_type_is_a_text(config):
    with pytest.raises(CheckpointError, match=r"model_type is \['a'\] in config.json"):
        specs.load_for(config, [])


def test_what_a_wrapper_wraps_is_a_mapping():
    with pytest.raises(CheckpointError, match=r"text_config is \[\] in config.json"):
        specs.load_for({"model_type": "llava", "text_config": []}, [])


# --- specs of users ---


def written(folder: Path, **entries: Any) -> specs.ArchSpec:
    """A spec of model_type "a" with these entries."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"model_type": "a", **entries}), encoding="utf-8")
    return specs.load("a", path)


def together(role: str = "reader", **entries: Any) -> dict[str, Any]:
    norm = {"norm": "none"} if role == "reader" else {}
    parts = ["l.{layer}.e.{expert}.a", "l.{layer}.e.{expert}.b"]
    return {"role": role, **norm, "axes": "expert out in",
            "written_as": parts if role == "reader" else parts[:1], **entries}  # fmt: skip


X = "l.{layer}.x"
WRONG_EXPERTS = {
    "no expert": ({X: together(written_as=["l.{layer}.a"])}, "write a name with {layer} and"),
    "no layer": ({X: together(written_as=["e.{expert}.a"])}, "write a name with {layer} and"),
    "a layer too many": ({"x": together(written_as=["l.{layer}.{expert}"])}, "with {expert} there"),
    "wildcard": ({X: together(written_as=["l.{layer}.{expert}.*"])}, "write a name with"),
    "twice": ({X: together(written_as=["l.{layer}.{expert}.a"] * 2)}, "name of its own"),
    "of two modules": ({X: together(), "l.{layer}.y": together("writer")}, "of l.{layer}.x holds"),
    "another module": (
        {X: together(), "l.{layer}.e.{expert}.a": {"role": "reader", "norm": "none"}},
        "which is another module",
    ),
    "another role": (
        {X: together(variant="e/one"), "l.{layer}.e.{expert}.a": {"role": "writer",
                                                                  "variant": "e/apart"}},
        "which is another module",
    ),
    "two of a writer": (
        {X: together("writer", written_as=[f"l.{{layer}}.{{expert}}.{n}" for n in "ab"])},
        "give a writer one",
    ),
    "a text": ({X: together(written_as="l.{layer}.{expert}")}, "write a list of names"),
    "none": ({X: {"role": "writer", "axes": "expert out in"}}, "and no written_as"),
    "two names of one module": (
        {X: {"role": "inner", "written_as": ["l.{layer}.a", "l.{layer}.b"]}}, "give it one name",
    ),
    "another number": ({X: {"role": "inner", "written_as": ["a"]}}, "the numbers that the pattern"),
    "of no module": (
        {X: {"role": "inner", "written_as": ["l.{layer}.a"]}}, "which is no module of role inner",
    ),
    "of a module beside it": (
        {X: {"role": "inner", "written_as": ["l.{layer}.a"]}, "l.{layer}.a": {"role": "inner"}},
        "which is another module",
    ),
    "a joiner": (
        {"n": {"role": "norm"}, X: {"role": "joiner", "norm": ["n"], "axes": "expert out in"}},
        "is a joiner and has an axis of experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_EXPERTS)
def test_experts_have_names_of_their_own(case, tmp_path):
    modules, sentence = WRONG_EXPERTS[case]
    with pytest.raises(UnsupportedError) as refused:
        written(tmp_path, experts="n", modules=modules)
    assert sentence in str(refused.value)
    assert str(tmp_path / "spec.yaml") in str(refused.value)


def test_variants_that_exclude_each_other_may_share_names(tmp_path):
    apart = {"role": "reader", "norm": "none", "variant": "e/apart"}
    spec = written(tmp_path, experts="n", modules={
        X: together(variant="e/old"), "l.{layer}.y": together(variant="e/new"),
        "l.{layer}.e.{expert}.a": apart, "l.{layer}.e.{expert}.b": apart,
    })  # fmt: skip
    assert len(spec.modules) == 4


WRONG_ENTRIES = {
    "division by 0": ({"defaults": {"a": "hidden_size // 0"}}, "defaults holds"),
    "multiple of 0": ({"multiples": {"a": "1-1"}}, "multiples holds '1-1': write"),
    "half a value path": ({"value_path": {"heads": "a"}}, "both heads and head_dim"),
    "another value path": (
        {"value_path": {"heads": "a", "head_dim": "b", "size": "c"}}, "the entry 'size'",
    ),
    "rotation to refuse": ({"refuse": {"r3": "x"}}, "the entry 'r3': write one of mtp, r1, r2"),
    "layout to warn of": ({"warn": {"foo": "x"}}, "the entry 'foo': write one of comfy,"),
    "bracket": ({"keep": ["model.layers["]}, "keep holds 'model.layers['"),
    "braces": ({"keep": ["{foo}"]}, "keep holds '{foo}'"),
    "two layers": ({"keep": ["{layer}.{layer}"]}, "keep holds '{layer}.{layer}'"),
    "a flag's list": ({"unsupported": {"x": [1]}}, "unsupported holds [1]"),
    "a flag's size": ({"unsupported": {"x": "not a size"}}, "unsupported holds 'not a size'"),
    "derived from a power": ({"derived": {"x": "a ** b"}}, "derived holds 'a ** b'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_ENTRIES)
def test_a_wrong_entry_is_named(case, tmp_path):
    entries, sentence = WRONG_ENTRIES[case]
    with pytest.raises(UnsupportedError) as refused:
        written(tmp_path, extends="llama", **entries)
    assert sentence in str(refused.value)


WRONG_FIELDS = [
    ("quantize", "no", "write true or false"),
    ("optional", 1, "write true or false"),
    ("mtp", "true", "write true or false"),
    ("linear", None, "write true or false"),
    ("variant", {"a": 1}, "write a text"),
    ("variant", "mlp/", "write a text"),
    ("because", 3, "write a text"),
    ("fused", ["a"], "write a text"),
    ("suffixes", {"weight": 3}, "make each a text or null"),
    ("norm", [3], "write a list of names"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), WRONG_FIELDS)
def test_a_wrong_field_is_named(key, value, sentence, tmp_path):
    entry = {"role": "joiner" if key == "norm" else "writer", key: value}
    with pytest.raises(UnsupportedError) as refused:
        written(tmp_path, modules={"x": entry})
    assert f"{key} of x" in str(refused.value)
    assert sentence in str(refused.value)


def test_a_pattern_has_no_other_braces(tmp_path):
    with pytest.raises(UnsupportedError, match=r"'model\.\{foo\}\.x' is no pattern"):
        written(tmp_path, modules={"model.{foo}.x": {"role": "writer"}})


def test_what_may_warn_are_the_layouts_and_rotations_of_a_recipe(tmp_path):
    assert set(LAYOUT_NAMES) == document.LAYOUT_NAMES
    assert {"r1", "r2"} < set(ROTATIONS)
    for name in (*LAYOUT_NAMES, "r1", "r2"):
        assert written(tmp_path, extends="llama", warn={name: "x"}).warn == {name: "x"}
    with pytest.raises(UnsupportedError, match=r"the entry .mtp."):
        written(tmp_path, extends="llama", warn={"mtp": "x"})


def test_expressions_never_divide_by_0():
    assert not is_expression("a // 0")
    with pytest.raises(CheckpointError, match=r"a // \(b - b\) divides by 0"):
        Sizes({"a": 4, "b": 2}, {}).of("a // (b - b)")
    assert all(map(is_divisor, ("a", "2 * a", "a + b")))
    assert not any(map(is_divisor, ("1 - 1", "a - b", "a // b", "0 * a", "0", 3)))
