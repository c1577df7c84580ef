"""Which weights of a checkpoint are studied, and what is found."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nvfp4cli.checkpoint.reader import Checkpoint, open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.errors import RecipeError, UnsupportedError, UsageError, WeightError
from nvfp4cli.study import weights
from nvfp4cli.study.methods import METHODS, PLAIN
from nvfp4cli.study.weights import WeightErrors

NAMES = [method.name for method in METHODS]


@pytest.fixture
def llama(tiny_model) -> Checkpoint:
    return open_checkpoint(tiny_model("llama"))


@pytest.fixture
def made(tmp_path: Path):
    """`made({name: tensor}, **config)`: a checkpoint of one's own."""

    def make(tensors: dict[str, torch.Tensor], **config: object) -> Checkpoint:
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"} | config))
        return open_checkpoint(tmp_path)

    return make


def found(name: str, **errors: float | None) -> WeightErrors:
    by_name: dict[str, float | None] = dict.fromkeys(NAMES, 1.0)
    by_name.update({key.replace("_", "-"): value for key, value in errors.items()})
    return WeightErrors(name, weights.kind_of(name), 0, (16, 16), by_name)


def test_the_linear_weights_in_order(llama):
    names = weights.candidates(llama, "M", ())
    leaves = ["down_proj", "gate_proj", "up_proj", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert [weights.kind_of(name) for name in names] == leaves * 2
    assert [name.split(".")[2] for name in names] == ["0"] * 7 + ["1"] * 7


def test_layer_10_stands_behind_layer_9(made):
    tensors = {f"h.{i}.w.weight": torch.ones(16, 16) for i in (10, 9, 2)}
    checkpoint = made(tensors | {"h.final.weight": torch.ones(16, 16)})
    names = weights.candidates(checkpoint, "M", ["*"])
    assert names == ["h.final.weight", "h.2.w.weight", "h.9.w.weight", "h.10.w.weight"]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        (["*.down_proj"], 2),
        (["*.down_proj.weight"], 2),
        (["*.down_proj", "*.down_*", "lm_head"], 3),
        (["re:.*layers\\.1\\..*[kv]_proj"], 2),
        (["*"], 16),  # embedding and head too, no norms
    ],
)
def test_patterns(llama, patterns, count):
    assert len(weights.candidates(llama, "M", patterns)) == count


def test_patterns_that_cannot_work(llama):
    with pytest.raises(RecipeError, match=r"'\*\.nope' matches no matrix of M: name one such as"):
        weights.candidates(llama, "M", ["*.down_proj", "*.nope"])
    with pytest.raises(RecipeError, match=r"'model\.norm' matches no matrix"):
        weights.candidates(llama, "M", ["model.norm"])
    with pytest.raises(UsageError, match=r"'re:\(', which is no regular expression"):
        weights.check_patterns(["(", "re:("])


def test_a_quantised_checkpoint_is_refused(tiny_model, made, tmp_path):
    for layout in ("modelopt", "comfy"):  # with and without a word in config.json
        out = tmp_path / layout
        assert main(["quantize", str(tiny_model("llama")), str(out), "--layout", layout]) == 0
        with pytest.raises(UnsupportedError, match=r"^M is quantised already: study the unquanti"):
            weights.candidates(open_checkpoint(out), "M", ["*"])
    fp8 = made({"w.weight": torch.ones(16, 16)}, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedError, match="is quantised already"):
        weights.candidates(fp8, "M", ["*"])


def test_an_unknown_architecture_needs_patterns(made):
    checkpoint = made({"a.0.w.weight": torch.ones(16, 16)})
    with pytest.raises(UnsupportedError, match="'strange' says which weights are linear: name"):
        weights.candidates(checkpoint, "M", ())
    assert weights.candidates(checkpoint, "M", ["*.w"]) == ["a.0.w.weight"]


def test_a_linear_weight_of_another_kind_is_refused(made):
    name = "model.layers.0.mlp.down_proj.weight"
    checkpoint = made({name: torch.ones(16, 16, dtype=torch.int8)}, model_type="llama")
    with pytest.raises(UnsupportedError, match=r"down_proj.weight is int8 \[16, 16\] and no matri"):
        weights.candidates(checkpoint, "M", ())


def test_a_checkpoint_without_linear_weights_is_refused(made):
    checkpoint = made({"model.norm.weight": torch.ones(16)}, model_type="llama")
    with pytest.raises(UnsupportedError, match=r"^M holds none of the linear weights that its"):
        weights.candidates(checkpoint, "M", ())


def test_a_limit_is_spread_over_the_layers(made):
    tensors = {f"h.{i}.{w}.weight": torch.ones(16, 16) for i in range(7) for w in "ab"}
    checkpoint = made(tensors | {"h.0.c.weight": torch.ones(16, 16)})
    names = weights.candidates(checkpoint, "M", ["*"])

    def chosen(limit: int | None) -> list[str]:
        return [n.removesuffix(".weight")[2:] for n in weights.spread(names, checkpoint, limit)]

    assert chosen(1) == ["0.c", "3.a", "3.b"]
    assert chosen(2) == ["0.a", "0.b", "0.c", "6.a", "6.b"]
    assert chosen(3) == ["0.a", "0.b", "0.c", "3.a", "3.b", "6.a", "6.b"]
    assert len(chosen(7)) == len(chosen(100)) == len(chosen(None)) == 15


def test_the_budget_limits_where_nothing_else_does(made, monkeypatch):
    tensors = {f"h.{i}.{w}.weight": torch.ones(16, 16) for i in range(7) for w in "ab"}
    checkpoint = made(tensors)
    names = weights.candidates(checkpoint, "M", ["*"])
    for budget, count in ((1, 2), (512, 2), (1023, 2), (1024, 4), (7 * 512, 14)):
        monkeypatch.setattr(weights, "BUDGET", budget)
        assert len(weights.spread(names, checkpoint, None)) == count


def test_measured_errors(llama):
    name = "model.layers.1.mlp.down_proj.weight"  # [64, 128]
    (weight,) = weights.measure(llama, [name])
    assert (weight.name, weight.kind, weight.layer, weight.shape) == (
        name,
        "down_proj",
        1,
        (64, 128),
    )
    x = llama.read(name)
    assert weight.errors == {m.name: m.relative_error(x) for m in METHODS}
    assert weight.best == "nvfp4-four-over-six"


def test_rows_that_do_not_fit(made):
    checkpoint = made({"h.w.weight": torch.randn(4, 48), "odd.weight": torch.randn(4, 24)})
    odd, weight = weights.measure(checkpoint, ["odd.weight", "h.w.weight"])
    fitting = ["nvfp4", "nvfp4-h16", "nvfp4-qr16", "nvfp4-four-over-six"]
    assert [name for name, error in weight.errors.items() if error is not None] == fitting
    assert weight.layer is None
    assert set(odd.errors.values()) == {None}
    assert odd.best is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(made, value):
    tensor = torch.ones(2, 16)
    tensor[1, 3] = value
    with pytest.raises(WeightError, match=r"^w\.weight holds values that are NaN or Inf: repair"):
        list(weights.measure(made({"w.weight": tensor}), ["w.weight"]))


def test_summaries():
    plain = PLAIN.name
    a = found("a", nvfp4=0.2, nvfp4_h16=0.1, nvfp4_h128=None)
    b = found("b", nvfp4=0.4, nvfp4_h16=0.4, nvfp4_h128=0.3)
    means = weights.mean_errors([a, b])
    assert means[plain] == pytest.approx(0.3)
    assert means["nvfp4-h128"] is None  # b alone could not be compared with the others' means
    assert weights.mean_errors([b])["nvfp4-h128"] == 0.3
    assert weights.mean_errors([]) == dict.fromkeys(NAMES)
    counts = weights.best_counts([a, b, found("c", **dict.fromkeys(NAMES))])
    assert {name: n for name, n in counts.items() if n} == {"nvfp4-h16": 1, "nvfp4-h128": 1}
    by_name = {method.name: method for method in METHODS}
    assert weights.improved([a, b], by_name["nvfp4-h16"], PLAIN) == (1, 2)
    assert weights.improved([a, b], by_name["nvfp4-h128"], PLAIN) == (1, 1)


def test_a_stored_spec_is_used(tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    spec = """model_type: mine
modules: {"model.layers.{layer}.mlp.down_proj": {role: writer}}
"""
    (folder / "nvfp4-arch-spec.yaml").write_text(spec)
    names = weights.candidates(open_checkpoint(folder), "M", ())
    assert [weights.kind_of(name) for name in names] == ["down_proj"] * 2
