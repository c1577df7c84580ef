"""The kernels compile without a GPU; the interpreter takes more than the compiler does."""

import pytest
import torch

from nvfp4cli.formats import rotation

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")

POINTERS = {"packed_ptr": "*i32", "scale_ptr": "*u8", "amax_ptr": "*i32", "signs_ptr": "*fp32"}
SCALARS = {
    "n", "blocks_per_row", "halves_per_row", "words_per_row", "row_stride", "up_stride", "tiles",
    "x_stride", "padded_rows",
}  # fmt: skip


def compiled(kernel, architecture: int, constants: dict[str, object], **types: str) -> dict:
    """The stages of `kernel` for a target; types: of parameters that are not as everywhere."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**POINTERS, "multiplier_ptr": "*fp32", **dict.fromkeys(SCALARS, "i32"), **types}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if name not in constants]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned if signature[names[i]] != "fp32"},
    )
    target = GPUTarget("cuda", architecture, 32)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options).asm


def words(kind: str) -> str:
    return "*i64" if kind == "fp32" else "*i32"


def block_constants(kind: str, hadamard: int, gated: bool, ptx: bool) -> dict[str, object]:
    from nvfp4cli.kernels.load_triton import factors

    early, late = factors(hadamard, kind, gated, ptx)
    tile = {"COLUMNS": 64, "ROWS": 4, "EVEN": hadamard == 16, "KIND": kind}
    return {**tile, "HADAMARD": hadamard, "EARLY": early, "LATE": late, "PTX": ptx}


@pytest.mark.parametrize(
    ("architecture", "kind", "hadamard", "gated", "ptx"),
    [
        (90, "bf16", 16, False, True),
        (80, "fp16", 128, True, True),
        (90, "fp32", 1, False, True),
        (80, "bf16", 32, True, False),
    ],
)
def test_quantize_and_amax(architecture, kind, hadamard, gated, ptx):
    from nvfp4cli.kernels.amax_triton import _amax_kernel
    from nvfp4cli.kernels.quantize_triton import _quantize_kernel

    constants = block_constants(kind, hadamard, gated, ptx)
    constants |= {"GATED": gated, "SIGNED": hadamard == 128}
    inputs = {"x_ptr": words(kind), "up_ptr": words(kind)}
    assert compiled(_amax_kernel, architecture, constants, **inputs)["cubin"]
    constants |= {"SWIZZLED": gated, "EXACT_SIGNS": kind == "fp32" and not gated}
    ptx_text = compiled(_quantize_kernel, architecture, constants, **inputs)["ptx"]
    assert ("shf.l.wrap" in ptx_text) == ptx
    assert "st.global.v2.b32" in ptx_text  # the codes of a block at once


@pytest.mark.parametrize(("kind", "out"), [("bf16", "bf16"), ("fp32", "fp16")])
def test_through_and_back(kind, out):
    from nvfp4cli.kernels import dequantize_triton, mxfp4_triton

    constants = {**block_constants(kind, 32, False, True), "OUT_KIND": out}
    places = {"x_ptr": words(kind), "out_ptr": words(out)}
    for module in (dequantize_triton, mxfp4_triton):
        assert compiled(module._quantize_dequantize_kernel, 90, constants, **places)["cubin"]
    decoding = {"COLUMNS": 64, "ROWS": 16, "EVEN": True, "SWIZZLED": out == "fp16", "KIND": out}
    types = {"scale_ptr": "*i8", "multiplier": "fp32", "out_ptr": words(out)}
    kernel = dequantize_triton._dequantize_kernel
    assert compiled(kernel, 90, {**decoding, "PTX": True}, **types)["cubin"]


@pytest.mark.parametrize(("columns", "order"), [(1024, 1), (12 * 64, 12)])
def test_whole_rows(columns, order):
    from nvfp4cli.kernels import hadamard_triton, rows_triton

    dense = torch.ones(order, order, dtype=torch.int8) if order > 1 else None
    cut = rows_triton.tiling(columns, dense)
    constants = {**cut._asdict(), "KIND": "bf16", "PTX": True}
    inputs = {"x_ptr": "*i32", "up_ptr": "*i32", "signs_ptr": "*i32"}
    ahead = order == 1
    encoding = {"EARLY": rotation.normalizer(columns), "LATE": 1.0, "SWIZZLED": True}
    encoding |= {"GATED": not ahead, "EVEN": ahead, "AHEAD": ahead}
    types = {**inputs, "scale_ptr": "*i16"}
    kernel = hadamard_triton._quantize_kernel
    assert compiled(kernel, 90, {**constants, **encoding}, **types)["cubin"]


@pytest.mark.parametrize("columns", [16, 128])
def test_compensation(columns):
    from nvfp4cli.kernels.compensate_triton import _compensate_kernel

    arrays = ("left", "factors", "reciprocal", "step", "values", "errors")
    places = {f"{name}_ptr": "*fp32" for name in arrays}
    constants = {"COLUMNS": columns, "ROWS": 32}
    assert compiled(_compensate_kernel, 90, constants, columns="i32", **places)["cubin"]
