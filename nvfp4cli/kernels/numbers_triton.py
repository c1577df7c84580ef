"""The numbers of `formats` as Triton functions: E4M3 and E2M1 rounding, divisions, packing.

Nothing here depends on how a backend rounds a cast, divides, fuses or treats subnormals: scales and
codes are rounded with additions and integers, divisions are IEEE's, and kernels are launched with
enable_fp_fusion=False, so that a product is fused with an addition only where `tl.fma` says so,
which is where the product is exact. So the interpreter and every GPU from sm_80 on give the same
bytes. What is written in PTX is a shorter way to the same bits and has a portable twin.
"""

import torch
import triton
import triton.language as tl

from nvfp4cli.formats import e4m3

MAGIC = tl.constexpr(1.5 * 2**23)  # n + 1.5 * 2^23 is rounded to an integer, ties to even
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_E4M3_SMALLEST = tl.constexpr(e4m3.SMALLEST)
_SIXTH = tl.constexpr((torch.tensor(1.0) / 6).item())  # 1/6 rounded to fp32
# Outside, a quotient or a product of scales could be subnormal, where the short divisions fail.
_SMALLEST_FAST = tl.constexpr(2.0**-80)
_LARGEST_FAST = tl.constexpr(4.0)


def in_ptx(kernel: object) -> bool:
    """True where `kernel` is compiled for an NVIDIA GPU, so that inline PTX can be used."""
    return isinstance(kernel, triton.JITFunction) and torch.version.cuda is not None


@triton.jit
def e4m3_byte(v: tl.tensor) -> tl.tensor:
    """`e4m3.round_to_bytes`: non-negative fp32 -> nearest-even byte as int32, at most 126."""
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (v + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.minimum(tl.where(bits < 0x3C800000, subnormal, normal), 126)


@triton.jit
def e4m3_value(byte: tl.tensor) -> tl.tensor:
    """Byte 0..126 as int32 -> fp32. The type float8e4nv would need sm_89."""
    normal = ((byte << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * _E4M3_SMALLEST, normal)


@triton.jit
def e2m1_code(y: tl.tensor) -> tl.tensor:
    """`e2m1.encode`: fp32 -> code 0..15 as int32.

    Each line of the reference is rounded by the one addition that shifts it; doubling and halving
    are exact, so they may fuse with it. The shorter formula through |y| * 2^-126 rounds twice.
    """
    a = tl.abs(y)
    code = tl.minimum(tl.fma(a, 2.0, MAGIC), a + (MAGIC + 2))
    code = tl.minimum(tl.minimum(code, tl.fma(a, 0.5, MAGIC + 4)), MAGIC + 7)
    return (code.to(tl.int32, bitcast=True) & 7) | tl.where(y < 0, 8, 0)


@triton.jit
def block_scale(amax: tl.tensor, multiplier: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Block maxima -> (E4M3 byte as int32, fp32 reciprocal), as `formats.nvfp4.quantize`."""
    byte = e4m3_byte(tl.div_rn(tl.div_rn(amax, 6.0), multiplier))
    byte = tl.maximum(byte, tl.where(amax > 0, 1, 0))
    decoded = tl.where(byte > 0, e4m3_value(byte) * multiplier, 1.0)
    return byte, tl.minimum(tl.div_rn(1.0, decoded), FP32_MAX)


@triton.jit
def is_fast(multiplier: tl.tensor) -> tl.tensor:
    """True where `block_scale_ptx` gives the bits of `block_scale`."""
    return (multiplier > _SMALLEST_FAST) & (multiplier < _LARGEST_FAST)


@triton.jit
def block_scale_ptx(
    amax: tl.tensor,
    multiplier: tl.tensor,
    inverse: tl.tensor,
    FACTOR: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`block_scale` of amax * FACTOR, in a third of the instructions.

    inverse: 1 / multiplier, rounded to nearest. FACTOR: a power of two that has not been applied to
    the values; the reciprocal is multiplied by it, and by HALF. multiplier: one that `is_fast`, and
    less than 2^8 FACTOR HALF. Only the smallest quotients become subnormal numbers and are not
    rounded right, and those give byte 1 whatever their last bits. Of a block of zeros the byte is 0
    and the reciprocal finite.
    """
    # One correction is enough: no sixth is within a sixth of an ulp of a midpoint.
    sixth = amax * (_SIXTH * FACTOR)
    sixth = tl.fma(tl.fma(sixth, -6.0 / FACTOR, amax), _SIXTH * FACTOR, sixth)
    byte = tl.maximum(e4m3_byte(_divide(sixth, multiplier, inverse)), 1)
    # The byte in fp32's exponent and mantissa is s * 2^-120, of subnormal s too. In two steps,
    # because 2^120 / (FACTOR * HALF) can be too large for fp32.
    unit = multiplier * 2.0**60 * (2.0**60 / (FACTOR * HALF))
    scaled = (byte << 20).to(tl.float32, bitcast=True) * unit
    return tl.where(amax > 0, byte, 0), reciprocal_ptx(scaled)


@triton.jit
def _divide(a: tl.tensor, b: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """a / b rounded to nearest, with `inverse` = 1 / b rounded to nearest.

    Markstein, "IA-64 and Elementary Functions" (2000), theorem 8.5: a correction by the exact
    remainder rounds a quotient that is off by an ulp. The first of the two brings it there.
    """
    quotient = a * inverse
    quotient = tl.fma(tl.fma(-b, quotient, a), inverse, quotient)
    return tl.fma(tl.fma(-b, quotient, a), inverse, quotient)


@triton.jit
def reciprocal_ptx(d: tl.tensor) -> tl.tensor:
    """1 / d rounded to nearest, d in [2^-126, 2^126]; every mantissa was compared on an H200."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 y, e, n;
        rcp.approx.ftz.f32 y, $1;
        neg.f32 n, $1;
        fma.rn.f32 e, n, y, 0f3F800000;
        fma.rn.f32 $0, e, y, y;
        }""",
        "=r,r",
        [d],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pack_block(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    factor: tl.tensor,
    EXACT_SIGNS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Packed codes of sixteen values: two words, int32 [T, 2], to be stored at once.

    a, b, c, d: fp32 [T, 4], the even and the odd values of both halves. factor: [T], from value to
    code units; in PTX half of it, if not EXACT_SIGNS. Without them a product that is so small that
    it becomes -0 keeps its sign: for a reciprocal of 2^-12 one of a value below 2^-138, which no
    bf16 or fp16 value is.
    """
    first, second = _word(a, b, factor, EXACT_SIGNS, PTX), _word(c, d, factor, EXACT_SIGNS, PTX)
    return tl.join(first, second)


@triton.jit
def _word(even, odd, factor, EXACT_SIGNS: tl.constexpr, PTX: tl.constexpr):
    """Eight codes, int32 [T]."""
    if PTX:
        e0, e1, e2, e3 = split_four(even)
        o0, o1, o2, o3 = split_four(odd)
        return tl.inline_asm_elementwise(
            PACK_EXACT if EXACT_SIGNS else PACK_SHORT,
            "=r,r,r,r,r,r,r,r,r,r",
            [e0, e1, e2, e3, o0, o1, o2, o3, factor],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low, high = e2m1_code(even * factor[:, None]), e2m1_code(odd * factor[:, None])
        return tl.sum((low | (high << 4)) << (8 * tl.arange(0, 4)[None, :]), axis=1)


@triton.jit
def split_four(x):
    """[T, 4] -> four tensors [T]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


def _packing(product: str) -> str:
    """PTX for eight values: registers $1 to $4 even, $5 to $8 odd, $9 the factor, $0 the bytes.

    Nine instructions a value, against sixteen of `e2m1_code`. With h = |y| / 2 and sat(v) = v
    limited to [0, 1], which costs nothing in an addition, the code is 4 sat(h) + 2 sat(h - 1) +
    sat(h - 2), limited to 7. From right to left every term but one is whole and the one is rounded
    by its addition to MAGIC or a number above it, ties to the even code. The smallest of three
    lines takes an instruction less on sm_90, where VIMNMX3 finds it, and is no faster. Eight codes
    join by multiplications by 16, the top bits of y by funnel shifts.
    """
    order = [register for j in (3, 2, 1, 0) for register in (5 + j, 1 + j)]  # high nibbles first
    lines = [".reg .f32 h, a, p, q, s; .reg .b32 codes, tops, bits;"]
    lines += ["mov.b32 codes, 0; mov.b32 tops, 0;"]
    for register in order:
        lines += [
            product.format(register),
            "abs.f32 a, h;",
            "add.rn.sat.f32 p, a, 0f00000000;",
            "add.rn.sat.f32 q, a, 0fBF800000;",  # -1
            "add.rn.sat.f32 s, a, 0fC0000000;",  # -2
            "add.rn.f32 s, s, 0f4B400000;",  # MAGIC
            "fma.rn.f32 s, q, 0f40000000, s;",  # 2
            "fma.rn.f32 s, p, 0f40800000, s;",  # 4
            "mov.b32 bits, s; mad.lo.u32 codes, codes, 16, bits;",
            "mov.b32 bits, h; shf.l.wrap.b32 tops, bits, tops, 4;",
        ]
    # What the bits of MAGIC add up to in a word of eight nibbles, modulo 2^32.
    lines += [f"sub.u32 codes, codes, {0x4B400000 * 0x11111111 & 0xFFFFFFFF};"]
    lines += ["and.b32 tops, tops, 0x88888888; or.b32 $0, codes, tops;"]
    return "{ " + " ".join(lines) + " }"


# A product plus zero is never -0, unless it was rounded to it.
PACK_SHORT = tl.constexpr(_packing("fma.rn.f32 h, ${}, $9, 0f00000000;"))
# Half of it plus zero turns -0 into 0, and rounds the smallest negative number to -0.
PACK_EXACT = tl.constexpr(
    _packing("mul.rn.f32 h, ${}, $9; fma.rn.f32 h, h, 0f3F000000, 0f00000000;")
)
