"""Plans: every decision is made from headers alone, every mistake is said before work starts."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvfp4cli.checkpoint.reader import Checkpoint, open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.errors import CheckpointError, RecipeError, UnsupportedError
from nvfp4cli.layouts import LAYOUTS, open_weights
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def plan_for(model: Path, *, strict: bool = False, **recipe: object) -> Plan:
    return plan_quantize(
        open_checkpoint(model), Recipe(**recipe), model="m", arch_spec=None, strict=strict
    )


def decisions(plan: Plan) -> dict[str, tuple[str, str]]:
    return {member.name: (member.action, member.reason) for member in plan.members}


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", vocab=264)


@pytest.fixture
def headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("tensor data was read")

    for method in ("read", "read_rows", "read_bytes"):
        monkeypatch.setattr(Checkpoint, method, forbidden)


def test_every_tensor_is_decided(tiny_model, headers_only):
    model = tiny_model("qwen3", vocab=264, attention_bias=True)
    plan = plan_for(model, rotate="r1", ignore=("*.1.mlp.*",))
    found = decisions(plan)
    assert found.keys() == open_checkpoint(model).tensors.keys()
    layer = "model.layers.0"
    assert found["model.embed_tokens.weight"] == ("edit", "embedding")
    assert found["lm_head.weight"] == ("edit", "output head")
    assert found["model.norm.weight"] == ("edit", "norm")
    assert found[f"{layer}.input_layernorm.weight"] == ("edit", "norm")
    assert found[f"{layer}.self_attn.q_norm.weight"] == ("copy", "off the residual stream")
    assert found[f"{layer}.self_attn.q_proj.bias"] == ("copy", "bias")
    assert found[f"{layer}.self_attn.o_proj.bias"] == ("edit", "bias")
    for linear in LINEARS:
        part = "mlp" if linear in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        assert found[f"{layer}.{part}.{linear}.weight"] == ("quantize", "linear")
    for linear in ("gate_proj", "up_proj", "down_proj"):
        assert found[f"model.layers.1.mlp.{linear}.weight"] == ("edit", "--ignore")


def test_order_is_that_of_a_forward_pass(tiny_model):
    model = tiny_model("llama", layers=11, vocab=264)
    stages = list(dict.fromkeys(job.stage for job in plan_for(model).jobs))
    assert stages == ["embedding", *(f"layer {n}" for n in range(11)), "head"]


def test_groups_share_a_job(llama):
    jobs = [[m.module.rpartition(".")[2] for m in job.members] for job in plan_for(llama).jobs]
    assert jobs[1:6] == [
        ["input_layernorm"],
        ["q_proj", "k_proj", "v_proj"],
        ["o_proj"],
        ["post_attention_layernorm"],
        ["gate_proj", "up_proj"],
    ]


def test_jobs_do_not_depend_on_the_source_files(tiny_model):
    single = plan_for(tiny_model("llama", vocab=264))
    dealt = plan_for(tiny_model("llama", vocab=264, shards=5))
    assert [m.name for m in single.members] == [m.name for m in dealt.members]
    assert [s.header for s in single.shards] == [s.header for s in dealt.shards]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"rotate": "r1r2"}, {"dtype": "float32"}])
def test_sizes_are_those_of_the_files(layout, options, tiny_model, tmp_path):
    model, out = tiny_model("llama", vocab=264, tie=True), tmp_path / "out"
    plan = plan_for(model, layout=layout, max_shard_size="50KB", **options)
    flags = [text for key, value in options.items() for text in (f"--{key}", value)]
    argv = ["quantize", str(model), str(out), "--layout", layout, "--max-shard-size", "50KB"]
    assert main([*argv, *flags]) == 0
    files = {path.name: path.stat().st_size for path in out.glob("*.safetensors")}
    assert files == {shard.file: shard.size for shard in plan.shards}
    assert (len(files) == 1) == LAYOUTS[layout].SINGLE_FILE
    assert plan.output_bytes == sum(files.values())
    stored = [t for file in files for t in load_file(out / file).values()]
    totals = plan.totals()
    assert totals["bytes"] == sum(t.nbytes for t in stored)
    assert totals["bits_per_parameter"] == 8 * totals["bytes"] / totals["parameters"]


def test_totals(llama):
    plan, tensors = plan_for(llama), load_file(llama / "model.safetensors")
    totals = plan.totals()
    linears = [t for name, t in tensors.items() if name.split(".")[-2] in LINEARS]
    assert totals["parameters"] == sum(t.numel() for t in tensors.values())
    assert totals["quantized_parameters"] == sum(t.numel() for t in linears)
    assert plan.source_bytes == sum(t.nbytes for t in tensors.values())


def test_streamed_tensors_need_no_memory(tiny_model):
    """The embedding and the head, most of a small model, pass through in tiles."""
    small, large = (
        plan_for(tiny_model("llama", vocab=vocab), rotate="r1") for vocab in (264, 2640)
    )
    assert small.memory_bytes == large.memory_bytes
    wide = tiny_model("llama", vocab=264, intermediate=1024)
    assert plan_for(wide, rotate="r1").memory_bytes > small.memory_bytes


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.down_proj", {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}),
        ("model.layers.1.mlp.down_proj", {"model.layers.1.mlp.down_proj"}),
        ("re:.*layers\\.0\\.mlp\\.(gate|up)", {"model.layers.0.mlp.gate_proj",
                                               "model.layers.0.mlp.up_proj"}),
        ("re:model.layers.1.mlp.down", {"model.layers.1.mlp.down_proj"}),
    ],
)  # fmt: skip
def test_ignore_patterns(pattern, expected, llama):
    plan = plan_for(llama, ignore=(pattern,), layout="modelopt")
    kept = {n.removesuffix(".weight") for n, (_, why) in decisions(plan).items() if "ignore" in why}
    assert kept == expected
    ignored = json.loads(plan.files["config.json"])["quantization_config"]["ignore"]
    assert set(ignored) == expected | {"lm_head"}


@pytest.mark.parametrize("option", ["ignore", "include"])
@pytest.mark.parametrize("pattern", ["down_proj", "re:down_proj", "*.norm", "model.embed_tokens"])
def test_a_pattern_without_a_match_is_said(option, pattern, llama):
    recipe = {"layout": "modelopt", option: (pattern,)}
    (note,) = [w for w in plan_for(llama, **recipe).facts.warnings if "matches" in w]
    assert note.startswith(f"--{option} {pattern!r} matches no linear module")
    with pytest.raises(RecipeError, match="matches no linear module"):
        plan_for(llama, strict=True, **recipe)


def test_ignoring_a_part_of_a_fused_layer(llama):
    plan = plan_for(llama, ignore=("*.1.self_attn.k_proj",))
    (note,) = [w for w in plan.facts.warnings if "only a part" in w]
    assert note == (
        "The patterns quantise only a part of model.layers.1.self_attn.qkv_proj, which engines "
        "refuse: ignore all of q_proj, k_proj, v_proj or none of them."
    )
    both = plan_for(llama, ignore=("*.gate_proj",)).facts.warnings
    assert any("layers.0.mlp.gate_up_proj and of 1 more such layer, which" in w for w in both)
    with pytest.raises(RecipeError, match="only a part"):
        plan_for(llama, ignore=("*.gate_proj",), strict=True)
    whole = plan_for(llama, ignore=("*.gate_proj", "*.up_proj")).facts.warnings
    assert not any("only a part" in w for w in whole)


def test_ignoring_everything_is_refused(llama):
    with pytest.raises(RecipeError, match=r"nothing to quantise.*--scheme none\."):
        plan_for(llama, ignore=("*",))


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_the_head_can_be_included(layout, llama):
    plan = plan_for(llama, include=("lm_head",), layout=layout)
    assert decisions(plan)["lm_head.weight"] == ("quantize", "--include")
    assert "lm_head" not in plan.facts.kept


def test_ignore_wins_over_include(llama):
    plan = plan_for(llama, include=("lm_head",), ignore=("lm_head",), layout="modelopt")
    assert decisions(plan)["lm_head.weight"][0] == "copy"


def test_torchao_cannot_include_the_head(llama):
    with pytest.raises(RecipeError, match=r"torchao layout keeps lm_head"):
        plan_for(llama, include=("lm_head",))
    # A pattern that names only what is quantised anyway asks for nothing impossible.
    assert decisions(plan_for(llama, include=("*.q_proj",))) == decisions(plan_for(llama))


def test_a_tied_head_cannot_be_included(tiny_model):
    tied = tiny_model("llama", vocab=264, tie=True)
    with pytest.raises(RecipeError, match=r"lm_head is tied.*leave it out of --include\."):
        plan_for(tied, include=("lm_head",), layout="modelopt")
    untied = plan_for(tied, include=("lm_head",), layout="modelopt", rotate="r1")
    assert decisions(untied)["lm_head.weight"] == ("quantize", "--include")


def test_narrow_layers_are_listed_in_one_error(tiny_model):
    model = tiny_model("llama", hidden=72, head_dim=18, vocab=264)
    with pytest.raises(UnsupportedError) as caught:
        plan_for(model)
    message = str(caught.value)
    for layer in range(2):
        for name, rows in (("q", 72), ("k", 36), ("v", 36), ("o", 72)):
            assert f"model.layers.{layer}.self_attn.{name}_proj [{rows}, 72]" in message
        for name in ("gate", "up"):
            assert f"model.layers.{layer}.mlp.{name}_proj [128, 72]" in message
    assert "down_proj" not in message
    patterns = [part.split("'")[0] for part in message.split("--ignore '")[1:]]
    found = decisions(plan_for(model, ignore=tuple(patterns)))
    assert sum(action == "quantize" for action, _ in found.values()) == 2


def test_a_narrow_head_made_from_the_embedding(tiny_model):
    model = tiny_model("llama", hidden=72, head_dim=18, vocab=264, tie=True)
    ignored = ("re:.*(q|k|v|o|gate|up)_proj",)
    with pytest.raises(UnsupportedError, match=r"lm_head \[264, 72\]"):
        plan_for(model, rotate="r1", layout="modelopt", ignore=ignored, include=("lm_head",))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_awkward_sizes_work_with_a_warning(layout, tiny_model, tmp_path):
    model = tiny_model("llama", hidden=80, head_dim=20, intermediate=208, vocab=264)
    warnings = plan_for(model, layout=layout).facts.warnings
    assert any("multiples of 64" in w and "q_proj.weight [80, 80]" in w for w in warnings)
    out = tmp_path / "out"
    assert main(["quantize", str(model), str(out), "--layout", layout]) == 0
    weights = open_weights(open_checkpoint(out))
    down = weights.stored("model.layers.0.mlp.down_proj").weight
    gate = weights.stored("model.layers.0.mlp.gate_proj").weight
    assert down.block_scale.shape == (80, 13)
    assert gate.block_scale.shape == (208, 5)
    source = load_file(model / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"].float()
    error = (weights.tensor("model.layers.0.mlp.gate_proj.weight") - source).square().mean()
    assert error / source.square().mean() < 0.0125  # 0.009 for Gaussian weights


def test_torchao_rows_of_fused_layers(tiny_model):
    shape = {"hidden": 128, "heads": 4, "head_dim": 64, "vocab": 264, "layers": 1}
    good = plan_for(tiny_model("llama", intermediate=256, **shape))
    assert good.facts.warnings == ()
    assert good.facts.next_step == "Serve: vllm serve {out}"
    ragged = tiny_model("llama", intermediate=192, **shape)
    plan = plan_for(ragged)
    (warning,) = plan.facts.warnings
    assert "gate_proj.weight and 1 more" in warning
    assert "--layout compressed-tensors" in warning
    assert plan.facts.next_step.startswith("Load: transformers")
    assert plan_for(ragged, layout="compressed-tensors").facts.warnings == ()
    # Rows of a layer that is not fused do not matter: o_proj and down_proj have 192 here.
    shape |= {"hidden": 192}
    assert plan_for(tiny_model("llama", intermediate=256, **shape)).facts.warnings == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_source_is_read_with_a_warning(layout, llama, tmp_path):
    assert main(["quantize", str(llama), str(tmp_path / "out"), "--layout", layout]) == 0
    plan = plan_for(tmp_path / "out")
    assert re.match(rf"The source is quantised already \(NVFP4, {layout}\)", plan.facts.warnings[0])
    assert {m.name for m in plan.members} == {m.name for m in plan_for(llama).members}


def altered(model: Path, folder: Path, **config: object) -> Path:
    shutil.copytree(model, folder)
    document = json.loads((folder / "config.json").read_text())
    document |= config
    kept = {key: value for key, value in document.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def test_other_quantisations_are_refused_by_name(llama, tmp_path):
    model = altered(llama, tmp_path / "m", quantization_config={"quant_method": "fp8"})
    assert plan_for(model).facts.warnings == plan_for(llama).facts.warnings
    model = altered(llama, tmp_path / "n", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedError, match="gptq"):
        plan_for(model)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, 0, "two"])
def test_config_without_sizes(key, value, llama, tmp_path):
    said = f"has no {key}" if value is None else f"{key} is {value!r} in"
    with pytest.raises(CheckpointError, match=said):
        plan_for(altered(llama, tmp_path / "m", **{key: value}))


def test_config_that_disagrees_with_the_weights(llama, tmp_path):
    model = altered(llama, tmp_path / "m", hidden_size=128)
    with pytest.raises(CheckpointError, match=r"hidden_size is 128 .*embed_tokens.*\[264, 64\]"):
        plan_for(model, rotate="r1")


def test_integer_weights_are_refused(llama, tmp_path):
    model = tmp_path / "m"
    shutil.copytree(llama, model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} .* is float8_e4m3fn .* without a scale"):
        plan_for(model)


def test_pickles_are_refused(llama, tmp_path, capsys):
    model = tmp_path / "m"
    shutil.copytree(llama, model)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert main(["quantize", str(model), str(tmp_path / "out")]) == 1
    assert "pytorch_model" in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [(), ("--ignore", "*.0.mlp.*"), ("--rotate", "r1")])
@pytest.mark.parametrize("tie", [False, True])
def test_config_agrees_with_the_tensors(layout, options, tie, tiny_model, tmp_path):
    out = tmp_path / "out"
    model = tiny_model("llama", vocab=264, tie=tie)
    assert main(["quantize", str(model), str(out), "--layout", layout, *options]) == 0
    quantized = set(open_weights(open_checkpoint(out)).quantized)
    linears = {
        f"model.layers.{n}.{part}.{name}"
        for n in range(2)
        for part, names in (("self_attn", LINEARS[:4]), ("mlp", LINEARS[4:]))
        for name in names
    } | {"lm_head"}
    assert len(quantized) == (11 if "--ignore" in options else 14)
    config = json.loads((out / "config.json").read_text())
    quantization = config.get("quantization_config", {})
    if layout == "comfy":
        assert not quantization
    elif layout == "torchao":
        assert set(quantization["modules_to_not_convert"]) == linears - quantized
    else:
        assert set(quantization["ignore"]) == linears - quantized
        group = quantization["config_groups"]["group_0"]
        assert not group.get("input_activations")
        assert group["weights"]["group_size"] == 16
    side = out / "hf_quant_config.json"
    assert side.exists() == (layout == "modelopt")
    if layout == "modelopt":
        facts = json.loads(side.read_text())["quantization"]
        assert set(facts["exclude_modules"]) == linears - quantized
        assert facts["quant_algo"] == quantization["quant_algo"] == "W4A16_NVFP4"
        assert facts["group_size"] == 16
        assert facts["kv_cache_quant_algo"] is None
    tied = tie and "--rotate" not in options
    assert config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not tied
