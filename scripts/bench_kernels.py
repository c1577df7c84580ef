#!/usr/bin/env python
"""Time the GPU kernels against a copy of the same bytes, torch.compile and unfused versions.

    python scripts/bench_kernels.py [--shapes 8192x8192,1x8192] [--csv FILE] [--only TEXT]

Each kernel's bits are compared with the reference first; a difference ends the run. The rows
"other:" are what there was before: eager torch, a plain Triton kernel, torchao where installed.
Times are medians of triton.testing.do_bench, of CUDA graphs so that the time of launching from
Python is left out, the L2 cache flushed before each. "x copy" is the time over that of a device
copy that reads and writes the same number of bytes in all, timed in the same run.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import triton
from kernel_baselines import (
    compiled_gated,
    compiled_quantize,
    compiled_rotated,
    eager,
    plain_triton,
    sylvester,
    three_kernels,
    torchao,
)
from torch import Tensor
from triton.testing import do_bench

from nvfp4cli import kernels
from nvfp4cli.formats import mxfp4, nvfp4, rotation, swizzle
from nvfp4cli.formats.nvfp4 import GlobalScale

SHAPES = "1x8192,128x8192,8192x8192,32768x8192"
BITS = 256  # rows whose bits are compared, with the reference on the CPU


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in microseconds."""

    kernel: str
    shape: str
    us: float
    tb_per_s: float
    of_copy: float
    of_compiled: float
    of_unfused: float


@dataclass(frozen=True)
class Case:
    """A kernel and what it is measured against.

    run: on inputs of the shape. reference: the tensors that it must return, None for other code.
    compiled, unfused: the same work by torch.compile and by separate kernels, or None.
    """

    name: str
    run: Callable[[], tuple[Tensor, ...]]
    reference: Callable[[], tuple[Tensor, ...]] | None
    inputs: tuple[Tensor, ...]
    compiled: Callable[[], object] | None = None
    unfused: Callable[[], object] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This measures kernels on a CUDA device, and there is none.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    rows = []
    for shape in options.shapes.split(","):
        n, k = map(int, shape.split("x"))
        for case in cases(n, k):
            if options.only in case.name:
                check(case)
                rows.append(measure(case, shape))
                print(line(rows[-1]), flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows([[getattr(row, f.name) for f in fields(Row)] for row in rows])


def cases(n: int, k: int) -> list[Case]:
    """Every kernel on random bf16 [n, k]."""
    torch.manual_seed(0)
    x = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    up = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    plain, rotated = scale_of(x), scale_of(x, hadamard=16)
    gated = scale_of(x, up=up, hadamard=16)

    def fused(scale: GlobalScale, **options: object) -> Callable[[], tuple[Tensor, ...]]:
        multiplier = torch.tensor([scale.multiplier], device="cuda")
        return lambda: kernels.fused_quantize(x, multiplier, **options)

    def expected(
        scale: GlobalScale, prepare: Callable[[Tensor, Tensor], Tensor], swizzled: bool = False
    ) -> Callable[[], tuple[Tensor, ...]]:
        def reference() -> tuple[Tensor, ...]:
            q = nvfp4.quantize(prepare(x[:BITS].cpu(), up[:BITS].cpu()), scale)
            return q.packed, swizzle.swizzle(q.block_scale) if swizzled else q.block_scale

        return reference

    def h16(a: Tensor, _: Tensor) -> Tensor:
        return rotation.block_hadamard(a, 16)

    def gate_h16(a: Tensor, b: Tensor) -> Tensor:
        return rotation.block_hadamard(rotation.silu_mul(a, b), 16)

    return [
        Case(
            "quantize",
            fused(plain),
            expected(plain, lambda a, _: a),
            (x,),
            lambda: compiled_quantize()(x, plain.multiplier),
        ),
        Case(
            "quantize, H16",
            fused(rotated, hadamard=16),
            expected(rotated, h16),
            (x,),
            lambda: compiled_rotated()(x, sylvester(), rotated.multiplier),
            lambda: three_kernels(x, rotated.multiplier),
        ),
        Case(
            "quantize, H16, swizzled",
            fused(rotated, hadamard=16, swizzled_scales=True),
            expected(rotated, h16, True),
            (x,),
        ),
        Case("quantize, H128", fused(scale_of(x, hadamard=128), hadamard=128),
             expected(scale_of(x, hadamard=128), lambda a, _: rotation.block_hadamard(a, 128)),
             (x,)),
        Case(
            "SiLU * up, H16, quantize",
            fused(gated, up=up, hadamard=16),
            expected(gated, gate_h16),
            (x, up),
            lambda: compiled_gated()(x, up, sylvester(), gated.multiplier),
        ),
        Case("amax", lambda: (kernels.fused_amax(x),),
             lambda: (x.abs().max().float(),), (x,)),
        Case("amax, H16", lambda: (kernels.fused_amax(x, hadamard=16),),
             lambda: (rotation.block_hadamard(x, 16).abs().max(),), (x,)),
        *_decoding(x, plain),
        *_whole_rows(x, up),
        *_others(x, plain, rotated),
    ]  # fmt: skip


def _others(x: Tensor, plain: GlobalScale, rotated: GlobalScale) -> list[Case]:
    """The same work by other code, as fast as it gets."""
    others = [
        Case("other: eager torch", lambda: eager(x, plain.multiplier), None, (x,)),
        Case("other: plain Triton", lambda: plain_triton(x, plain.multiplier, False), None, (x,)),
        Case("other: plain Triton, H16",
             lambda: plain_triton(x, rotated.multiplier, True), None, (x,)),
    ]  # fmt: skip
    if quantize := torchao():
        scale = torch.tensor(plain.multiplier, device="cuda")
        others.append(Case("other: torchao, compiled", lambda: quantize(x, scale), None, (x,)))
    return others


def _whole_rows(x: Tensor, up: Tensor) -> list[Case]:
    """The Walsh-Hadamard transform of whole rows, alone and with the encoder behind it."""

    def encoded(rows: Tensor, scale: GlobalScale) -> tuple[Tensor, ...]:
        q = nvfp4.quantize(rows, scale)
        return q.packed, q.block_scale

    def gated_rows() -> Tensor:
        return rotation.silu_mul(x[:BITS].cpu(), up[:BITS].cpu())

    plain = GlobalScale.from_amax(kernels.hadamard_amax(x).item())
    gated = GlobalScale.from_amax(kernels.hadamard_amax(x, up=up).item())
    one, other = (torch.tensor([s.multiplier], device="cuda") for s in (plain, gated))
    return [
        Case("row Hadamard", lambda: (kernels.hadamard(x),),
             lambda: (rotation.hadamard_rows(x[:BITS].cpu()).bfloat16(),), (x,)),
        Case("row Hadamard, quantize", lambda: kernels.hadamard_quantize(x, one),
             lambda: encoded(rotation.hadamard_rows(x[:BITS].cpu()), plain), (x,)),
        Case("SiLU * up, row Hadamard, quantize",
             lambda: kernels.hadamard_quantize(x, other, up=up),
             lambda: encoded(rotation.hadamard_rows(gated_rows()), gated),
             (x, up)),
    ]  # fmt: skip


def _decoding(x: Tensor, scale: GlobalScale) -> list[Case]:
    """Dequantising, and quantising with dequantising behind it, of NVFP4 and MXFP4."""
    bf16 = torch.bfloat16
    multiplier = torch.tensor([scale.multiplier], device="cuda")
    q, mx = kernels.quantize(x, scale), kernels.quantize_mxfp4(x)

    def nvfp4_reference() -> Tensor:
        return nvfp4.dequantize(nvfp4.quantize(x[:BITS].cpu(), scale)).to(bf16)

    def mxfp4_reference() -> Tensor:
        return mxfp4.dequantize(mxfp4.quantize(x[:BITS].cpu())).to(bf16)

    def mxfp4_bytes() -> tuple[Tensor, ...]:
        reference = mxfp4.quantize(x[:BITS].cpu())
        return reference.packed, reference.block_scale

    return [
        Case("dequantize", lambda: (kernels.dequantize(q, bf16),),
             lambda: (nvfp4_reference(),), (q.packed, q.block_scale)),
        Case("quantize, dequantize",
             lambda: (kernels.quantize_dequantize(x, multiplier),),
             lambda: (nvfp4_reference(),), (x,)),
        Case("MXFP4 quantize", lambda: _bytes(kernels.quantize_mxfp4(x)), mxfp4_bytes, (x,)),
        Case("MXFP4 dequantize", lambda: (kernels.dequantize_mxfp4(mx, bf16),),
             lambda: (mxfp4_reference(),), (mx.packed, mx.block_scale)),
        Case("MXFP4 quantize, dequantize",
             lambda: (kernels.quantize_dequantize_mxfp4(x),),
             lambda: (mxfp4_reference(),), (x,)),
    ]  # fmt: skip


def _bytes(q: mxfp4.Quantized) -> tuple[Tensor, ...]:
    return q.packed, q.block_scale


def scale_of(x: Tensor, **options: object) -> GlobalScale:
    return GlobalScale.from_amax(kernels.fused_amax(x, **options).item())


def check(case: Case) -> None:
    """End the run if a bit differs from the reference, which may have the first rows only."""
    if case.reference is None:
        return
    for found, wanted in zip(case.run(), case.reference(), strict=True):
        expected = wanted.cpu().flatten().view(torch.uint8)
        # Whole tiles of rows come first in both orders of the scales.
        answer = found.flatten().view(torch.uint8)[: expected.numel()].cpu()
        if different := int((answer != expected).sum()):
            sys.exit(f"{case.name}: {different} bytes differ from the reference")


def measure(case: Case, shape: str) -> Row:
    nbytes = sum(t.nbytes for t in (*case.inputs, *case.run()))
    us = timed(case.run)
    source = torch.empty(max(1, nbytes // 2), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source))
    return Row(
        case.name,
        shape,
        us,
        nbytes / us / 1e6,
        us / copy,
        us / timed(case.compiled) if case.compiled else math.nan,
        us / timed(case.unfused) if case.unfused else math.nan,
    )


def timed(action: Callable[[], object]) -> float:
    """Microseconds on the device: replayed as a CUDA graph, so that launching is not timed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        action()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            action()
    return do_bench(graph.replay, return_mode="median") * 1e3


def line(row: Row) -> str:
    others = "".join(
        "        -" if math.isnan(ratio) else f"{ratio:9.2f}"
        for ratio in (row.of_compiled, row.of_unfused)
    )
    return (
        f"{row.kernel:34}{row.shape:>12}{row.us:10.1f} us{row.tb_per_s:7.2f} TB/s"
        f"{row.of_copy:7.2f} x copy{others} x compiled, unfused"
    )


if __name__ == "__main__":
    main()
