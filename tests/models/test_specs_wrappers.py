"""Specs of vision-language wrappers: what pictures put into the residual stream turns with it.

Twins have a vision tower and are shown a picture wherever `check.inputs` can; files come under
every naming that the hub and transformers have.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spec_twins import (
    EXACT,
    WRONG,
    Source,
    claims_of,
    inner,
    shapes_of,
    source,
    still,
    wrong,
)
from transformers import AutoConfig
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from nvfp4cli.check.compare import fold, logits
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models.spec import load_for

SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
FLAGS: dict[str, dict[str, Any]] = {
    "llava": {},
    "llava_next": {},
    "mistral3": {"tie_word_embeddings": False},
    "internvl": {"tie_word_embeddings": False},
    "gemma3": {},
    "llama4": {},
    "qwen2_vl": {"text_config": SECTIONS},
    "qwen2_5_vl": {"text_config": SECTIONS},
    "qwen3_vl": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}
GATED = ("qwen3_5", "qwen3_5_moe")
RENAMED = tuple(name for name in FLAGS if name not in ("llama4", "qwen3_vl", "qwen3_5"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """`made(model_type)`, the same for the same argument."""
    sources: dict[str, Source] = {}

    def make(model_type: str) -> Source:
        if model_type not in sources:
            folder = tmp_path_factory.mktemp(model_type) / "twin"
            twin = source(model_type, FLAGS[model_type], folder)
            sources[model_type] = shown(twin) if model_type == "llama4" else twin
        return sources[model_type]

    return make


@pytest.fixture(scope="module", autouse=True)
def llama4_runs():
    """Its wrapper asks the language model's output for an entry that this does not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
        yield


def shown(twin: Source) -> Source:
    """A twin of Llama 4 that reads a picture, which `inputs` does not give it."""
    config = twin.made.model.config
    vision = config.vision_config
    generator = torch.Generator().manual_seed(1)
    shape = (1, vision.num_channels, vision.image_size, vision.image_size)
    pixels = torch.randn(shape, generator=generator, dtype=torch.float64)
    patches = (vision.image_size // vision.patch_size) ** 2
    count = int(patches * vision.pixel_shuffle_ratio**2)
    ids = twin.given["input_ids"].clone()
    ids[0, 4 : 4 + count] = config.image_token_id
    given = {"input_ids": ids, "pixel_values": pixels}
    with torch.inference_mode():
        return replace(twin, given=given, before=logits(twin.made.model, given))


def rotation(model_type: str) -> str:
    """All that holds."""
    return {"gemma3": "r2", **dict.fromkeys(GATED, "r1")}.get(model_type, "r1r2")


@pytest.mark.parametrize("model_type", FLAGS)
def test_folds_keep_the_logits(model_type, made, tmp_path):
    twin = made(model_type)
    assert "pixel_values" in twin.given
    claims_of(shapes_of(twin.folder), twin.made.config)
    assert twin.error(tmp_path / "out", rotation(model_type)) <= EXACT


@pytest.mark.parametrize("model_type", RENAMED)
def test_names_of_the_model_class(model_type, made, tmp_path):
    twin = made(model_type)
    renamed = twin.renamed(tmp_path / "renamed")
    shapes = shapes_of(renamed)
    assert shapes.keys() != shapes_of(twin.folder).keys()
    assert "model.language_model.embed_tokens.weight" in shapes
    claims_of(shapes, twin.made.config)
    fold(renamed, tmp_path / "out", rotation(model_type))
    assert twin.error_of(tmp_path / "out") <= EXACT


@pytest.mark.parametrize(
    ("model_type", "rotate", "reason"),
    [
        ("gemma3", "r1", r"layers\.0\.post_attention_layernorm\.weight is a gain between"),
        ("qwen3_5", "r2", r"self_attn\.q_proj is a gate for every channel"),
    ],
)
def test_refusals_are_those_of_the_language_model(model_type, rotate, reason, made, tmp_path):
    with pytest.raises(UnsupportedError, match=f"does not hold for {model_type}: .*{reason}"):
        fold(made(model_type).folder, tmp_path / "out", rotate)


PROJECTOR = "multi_modal_projector.linear_2"
DEEPSTACK = "model.visual.deepstack_merger_list.*.linear_fc2"


@pytest.mark.parametrize(
    ("model_type", "edit"),
    [
        ("llava", inner(PROJECTOR)),
        ("llava", still(PROJECTOR)),
        ("llava_next", inner("image_newline")),
        ("mistral3", inner(PROJECTOR)),
        ("internvl", still(PROJECTOR)),
        ("llama4", inner("multi_modal_projector.linear_1")),
        ("qwen2_vl", inner("visual.merger.mlp.2")),
        ("qwen2_5_vl", still("visual.merger.mlp.2")),
        ("qwen3_vl", inner("model.visual.merger.linear_fc2")),
        ("qwen3_vl", inner(DEEPSTACK)),
        ("qwen3_vl", still(DEEPSTACK)),
        ("qwen3_5", still("model.visual.merger.linear_fc2")),
    ],
)
def test_what_a_picture_gives_must_turn_too(model_type, edit, made, tmp_path):
    spec = wrong(model_type, edit, tmp_path / "wrong.yaml")
    assert made(model_type).error(tmp_path / "out", "r1", spec) >= WRONG


@pytest.mark.parametrize("model_type", ["llava", "llava_next", "qwen2_vl"])
def test_a_writer_that_is_missing_is_named(model_type, made):
    twin = made(model_type)
    writer = "visual.merger.mlp.2.weight" if "qwen" in model_type else f"{PROJECTOR}.weight"
    shapes = {name: s for name, s in shapes_of(twin.folder).items() if name != writer}
    with pytest.raises(UnsupportedError, match=rf"lacks (model\.)?{writer}"):
        claims_of(shapes, twin.made.config)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_a_config_of_one_level(model_type, made, tmp_path):
    twin = made(model_type)
    outer = {key: value for key, value in twin.made.config.items() if key != "text_config"}
    inside = {k: v for k, v in twin.made.config["text_config"].items() if k != "model_type"}
    folder = tmp_path / "flat"
    folder.mkdir()
    save_file(load_file(twin.folder / "model.safetensors"), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(inside | outer), encoding="utf-8")
    claims_of(shapes_of(folder), inside | outer)
    fold(folder, tmp_path / "out", "r1r2")
    assert "text_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert twin.error_of(tmp_path / "out") <= EXACT


@pytest.mark.parametrize("model_type", GATED)
def test_an_mtp_block_stands_beside_the_language_model(model_type, made):
    twin = made(model_type)
    shapes = shapes_of(twin.folder)
    layer = next(n.partition(".self_attn.")[0] for n in shapes if ".self_attn.q_proj." in n) + "."
    block = {
        **{f"mtp.layers.0.{name.removeprefix(layer)}": shape
           for name, shape in shapes.items() if name.startswith(layer)},
        "mtp.fc.weight": [48, 96],
        **{f"mtp.{name}.weight": [48]
           for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
    }  # fmt: skip
    found = claims_of(shapes | block, twin.made.config)
    for name in block:
        one = found[name]
        assert one is not None and one.mtp


@pytest.mark.parametrize("model_type", FLAGS)
def test_defaults_of_a_text_config_that_says_nothing(model_type):
    """As those of LLaVA-1.5 and Gemma 3 on the hub, which leave out what is by default."""
    text = AutoConfig.for_model(AutoConfig.for_model(model_type).text_config.model_type)
    spec = load_for({"model_type": model_type, "text_config": {"model_type": text.model_type}}, ())
    sizes = spec.sizes({})
    wanted = {name: getattr(text, name, None) for name in spec.defaults}
    stated = {name: size for name, size in wanted.items() if size is not None}
    assert {"hidden_size", "num_hidden_layers", "num_attention_heads"} <= stated.keys()
    assert {name: sizes[name] for name in stated} == stated


@pytest.mark.parametrize("model_type", FLAGS)
def test_towers_and_projectors_stay_in_high_precision(model_type, made):
    twin = made(model_type)
    for name, one in claims_of(shapes_of(twin.folder), twin.made.config).items():
        if "visual" in name or "vision" in name or "projector" in name:
            assert one is None or not one.spec.quantize
