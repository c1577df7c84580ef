"""Files written by llm-compressor and ModelOpt (scripts/make_goldens.py), read as any user's."""

import json
from pathlib import Path

import pytest
import torch

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.formats import e2m1, nvfp4
from nvfp4cli.layouts import open_weights

DATA = Path(__file__).parent / "data"
LAYOUT = {"llm-compressor": "compressed-tensors", "modelopt": "modelopt"}
FILES = [f"{tool}-{scheme}" for tool in LAYOUT for scheme in ("w4a16", "w4a4")]


@pytest.fixture(params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_inspect_knows_them_and_finds_nothing_wrong(name, capsys):
    source = str(DATA / "source")
    assert main(["inspect", str(DATA / name), "--against", source, "--strict", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    tool, _, scheme = name.rpartition("-")
    assert (facts["layout"], facts["scheme"]) == (LAYOUT[tool], scheme)
    assert facts["violations"] == []
    # 20 dB is what NVFP4 gives on normally distributed weights: 10 log10(1 / 9.05e-3) = 20.4.
    assert facts["against"]["mean_snr_db"] == pytest.approx(20.4, abs=0.2)


@pytest.mark.parametrize(
    ("tool", "codes", "scales"),
    [
        # The same block scales; ModelOpt divides by them where we multiply by the reciprocal, and
        # 3 of 43,008 values lie so near to a midpoint that this decides.
        ("modelopt", 3, 0),
        # llm-compressor works on bf16 block maxima, so that 34 of 2,688 scales round elsewhere.
        ("llm-compressor", 100, 34),
    ],
)
def test_our_rounding_differs_from_theirs_in_a_known_number_of_values(tool, codes, scales):
    source = open_checkpoint(DATA / "source")
    weights = open_weights(open_checkpoint(DATA / f"{tool}-w4a16"))
    different_codes = different_scales = 0
    for module in weights.quantized:
        theirs = weights.stored(module).weight
        ours = nvfp4.quantize(source.read(f"{module}.weight"), theirs.global_scale)
        different = e2m1.unpack(ours.packed) != e2m1.unpack(theirs.packed)
        different_codes += int(different.sum())
        bytes_of = [q.block_scale.view(torch.uint8) for q in (ours, theirs)]
        different_scales += int((bytes_of[0] != bytes_of[1]).sum())
    assert (different_codes, different_scales) == (codes, scales)


def test_they_convert_to_the_other_tool_and_back_without_loss(name, tmp_path):
    tool = name.rpartition("-")[0]
    other = next(layout for t, layout in LAYOUT.items() if t != tool)
    there, back = tmp_path / "there", tmp_path / "back"
    assert main(["convert", str(DATA / name), str(there), "--layout", other]) == 0
    assert main(["convert", str(there), str(back), "--layout", LAYOUT[tool]]) == 0
    before, after = (open_weights(open_checkpoint(p)) for p in (DATA / name, back))
    assert before.checkpoint.tensors.keys() == after.checkpoint.tensors.keys()
    for module in before.quantized:
        first, last = (w.stored(module, w.activations) for w in (before, after))
        assert torch.equal(first.weight.packed, last.weight.packed)
        scales = [s.weight.block_scale.view(torch.uint8) for s in (first, last)]
        assert torch.equal(*scales)
        one_ulp = 2.0**-23 * last.weight.global_scale.multiplier
        assert first.weight.global_scale.multiplier == pytest.approx(
            last.weight.global_scale.multiplier, abs=one_ulp
        )
        assert (first.input_scale is None) == (last.input_scale is None)
        if first.input_scale and last.input_scale:
            assert first.input_scale.multiplier == pytest.approx(
                last.input_scale.multiplier, rel=2.0**-23
            )


def test_w4a4_files_do_not_fit_into_torchao(tmp_path, capsys):
    argv = ["convert", str(DATA / "modelopt-w4a4"), str(tmp_path / "out"), "--layout", "torchao"]
    assert main(argv) == 1
    assert "input scales" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
