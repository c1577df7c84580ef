"""Sources beside other programs: their files, and their own dequantisation of ours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.layouts import open_weights
from nvfp4cli.layouts.sources import Source, open_source

DATA = Path(__file__).parents[1] / "data"


def opened(folder: Path, tensors: dict[str, Tensor]) -> Source:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return open_source(open_checkpoint(folder))


def fp8_blocks(n: int, k: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(n, k, generator=generator) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=generator) + 0.01
    return {"m.weight": weight, "m.weight_scale_inv": scale}


@pytest.mark.parametrize("folder", sorted(DATA.glob("*-w4a*")), ids=lambda path: path.name)
def test_files_of_other_tools(folder: Path) -> None:
    original = open_checkpoint(DATA / "source")
    source = open_source(open_checkpoint(folder))
    assert source.tensors.keys() == original.tensors.keys()
    assert len(source.auxiliary) == (7 if folder.name.endswith("w4a4") else 0)
    weights = open_weights(source.checkpoint)
    dequantized = 0
    for name, tensor in source.tensors.items():
        info = original.tensors[name]
        assert (tensor.shape, tensor.dtype) == (info.shape, info.dtype)
        values = source.read(name)
        assert torch.equal(values, weights.tensor(name))
        if tensor.stored:
            assert torch.equal(values, original.read(name))
        else:
            dequantized += 1
            difference = values - original.read(name).float()
            # 20 dB is what NVFP4 gives on normally distributed weights; see test_peers.
            assert difference.norm() < 0.12 * original.read(name).float().norm()
    assert dequantized == 7


def transformers_function(module: str, name: str) -> Callable[..., Any]:
    found = pytest.importorskip(f"transformers.integrations.{module}")
    if not hasattr(found, name):
        pytest.skip(f"this transformers has no {name}")
    return getattr(found, name)


def test_transformers_unpacks_gpt_oss_in_the_same_order(tmp_path: Path) -> None:
    judge = transformers_function("mxfp4", "convert_moe_packed_tensors")
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    bytes_ = torch.randint(100, 140, (2, 6, 3), generator=generator).to(torch.uint8)
    source = opened(tmp_path, {"up_blocks": blocks, "up_scales": bytes_})
    theirs = judge(blocks, bytes_, dtype=torch.float32)
    assert torch.equal(source.read("up"), theirs)


def test_transformers_dequantises_blocks_alike(tmp_path: Path) -> None:
    judge = transformers_function("finegrained_fp8", "Fp8Dequantize")
    if not hasattr(judge, "_dequantize_one"):
        pytest.skip("this transformers dequantises on a GPU only")
    tensors = fp8_blocks(256, 384)
    source = opened(tmp_path, tensors)
    theirs = judge(None)._dequantize_one(*tensors.values())
    assert theirs.dtype == torch.float32 and torch.equal(source.read("m.weight"), theirs)


def test_transformers_crops_edge_blocks_alike(tmp_path: Path) -> None:
    judge = transformers_function("finegrained_fp8", "_dequantize_fp8_weight")
    tensors = fp8_blocks(200, 136)
    source = opened(tmp_path, tensors)
    theirs = judge(*tensors.values(), [128, 128], torch.float32)
    assert torch.equal(source.read("m.weight"), theirs)
