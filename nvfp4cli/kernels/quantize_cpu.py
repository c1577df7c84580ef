"""NVFP4 encoding on a CPU: the bits of `formats.nvfp4.quantize` in a third of the time or less.

The matrix is cut into tiles of rows. A tile is copied into 16 planes, one for each position within
a block, so that reducing over a block, scaling it and packing its nibbles become operations on
long contiguous runs; over rows of 16 values they cost eager torch about 10 ns a row. The copy also
converts any dtype and any strides to contiguous fp32.

Measured on one core of an AMD EPYC with AVX2, bf16: the reference takes 15 ns a value, this 4 ns.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.formats.nvfp4 import (
    BLOCK,
    GlobalScale,
    Quantized,
    block_reciprocal,
    check_blocks,
)
from nvfp4cli.kernels.threads import one_thread, own_threads, single_threaded

# Values in a tile, which takes some forty torch calls of a few microseconds each: 2^16 values are
# too few to hide them, and more than 2^18 leave the cache of the smaller machines measured.
TILE = 1 << 18
# More threads queue for the GIL with those that read and write: of 16 cores, a whole run used four
# to reach 505 MB/s and three to reach 594.
_MAX_THREADS = 3

# Constants are tensors of their operation's dtype: a Python number is converted to one at every
# call, which takes 2 us.
_ZERO = torch.tensor(0.0)
_SIX = torch.tensor(e2m1.MAX)
_MAX_SCALE = torch.tensor(e4m3.MAX)
_HALF_WORD = torch.tensor(16, dtype=torch.int32)
_UPPER_HALF = torch.tensor(-(1 << 16), dtype=torch.int32)

# fp32 rounds n + 1.5 * 2^23 to an integer, ties to even, and counts it in its lowest bits.
_MAGIC = 1.5 * 2**23
_MAGIC_BITS = 0x4B400000
_DOUBLED = torch.tensor(_MAGIC)  # 2y
_SHIFTED = torch.tensor(_MAGIC + 2)  # y + 2
_HALVED = torch.tensor(_MAGIC + 4)  # y/2 + 4
_LARGEST = torch.tensor(_MAGIC + 7)

# Every block scale that is stored, decoded.
_SCALES = e4m3.decode(torch.arange(e4m3.MAX_BYTE + 1, dtype=torch.uint8))

# What the bits of _MAGIC add up to in a word of eight nibbles, modulo 2^32.
_MAGIC_WORD = torch.tensor(_MAGIC_BITS * 0x11111111 & 0xFFFFFFFF).to(torch.int32)


def amax_cpu(weight: Tensor) -> float:
    """`formats.nvfp4.amax` of a matrix [N, K], on the threads of `quantize_cpu`."""
    n = weight.shape[0]
    threads = _workers()
    rows = max(1, -(-n // threads))
    maxima = [0.0]

    @torch.inference_mode()
    def reduce(starts: Iterator[int]) -> None:
        maxima.extend([nvfp4.amax(weight[start : start + rows]) for start in starts])

    _share(reduce, range(0, n, rows), threads)
    # Unlike Python's, this maximum keeps a NaN.
    return torch.tensor(maxima, dtype=torch.float64).max().item()


def quantize_cpu(weight: Tensor, scale: GlobalScale) -> Quantized:
    """Round a matrix to NVFP4, bit for bit as `formats.nvfp4.quantize` does.

    weight: [N, K], any float dtype and strides, finite, on the CPU, K a multiple of 16. Runs on
    fewer than `torch.get_num_threads()` threads and may be called from several threads at once.
    """
    n, k = check_blocks(weight.shape)
    kb = k // BLOCK
    load = _loader(weight)
    words = torch.empty(n, kb * 2, dtype=torch.int32)  # eight codes each
    word_planes = words.unflatten(1, (kb, 2)).permute(2, 0, 1)  # [2, N, K/16]
    scale_byte = torch.empty(n, kb, dtype=torch.uint8)
    multiplier = torch.tensor(scale.multiplier)
    reciprocals = block_reciprocal(_SCALES, scale.multiplier)
    threads = _workers()
    rows = _tile_rows(n, k, threads)

    # Grad mode is a thread's own. Inference mode may write to the outputs whether or not the
    # caller is in inference mode, and keeps a weight that requires grad out of autograd.
    @torch.inference_mode()
    def encode(starts: Iterator[int]) -> None:
        scratch = _scratch(4 * BLOCK * rows * kb).view(4, BLOCK, rows, kb)
        for start in starts:
            tile = slice(start, start + rows)
            x, a, code, line = scratch[:, :, : min(rows, n - start)]
            load(tile, x)
            block_amax = torch.amax(torch.abs(x, out=a), dim=0)
            _round_scales(block_amax, multiplier, scale_byte[tile])
            index = scale_byte[tile].flatten().int()  # `reciprocals[...]` takes twice as long
            reciprocal = reciprocals.index_select(0, index).view_as(block_amax)
            _round_codes(torch.abs(x.mul_(reciprocal), out=a), code, line)
            # Only a scale that was rounded down by a seventh, a subnormal one, lets a code pass 7.
            if block_amax.mul_(reciprocal).max() >= 7:
                torch.minimum(code, _LARGEST, out=code)
            torch.add(code, x.lt_(_ZERO), alpha=8, out=code)
            _join(code, line, word_planes[:, tile])

    if weight.numel():
        _share(encode, range(0, n, rows), threads)
    return Quantized(words.view(torch.uint8), scale_byte.view(torch.float8_e4m3fn), scale)


def _loader(weight: Tensor) -> Callable[[slice, Tensor], None]:
    """How to copy rows of a [N, K] weight into fp32 planes [16, R, K/16].

    Two neighbouring bf16 values are one 32-bit word, and each is the upper half of its fp32 form:
    moving words and then shifting and masking takes 0.7 ns a value, converting 16-bit values 1.7.
    """
    paired = weight.stride(1) == 1 and weight.stride(0) % 2 == weight.storage_offset() % 2 == 0
    if weight.dtype != torch.bfloat16 or not paired:
        planes = weight.unflatten(1, (-1, BLOCK)).permute(2, 0, 1)  # [16, N, K/16]

        def convert(tile: slice, x: Tensor) -> None:
            x.copy_(planes[:, tile])

        return convert
    words = weight.view(torch.int32).unflatten(1, (-1, BLOCK // 2)).permute(2, 0, 1)

    def load(tile: slice, x: Tensor) -> None:
        even, odd = x.view(torch.int32)[0::2], x.view(torch.int32)[1::2]
        odd.copy_(words[:, tile])  # the element with the even index is the low half
        torch.bitwise_left_shift(odd, _HALF_WORD, out=even)
        odd.bitwise_and_(_UPPER_HALF)

    return load


def _round_scales(block_amax: Tensor, multiplier: Tensor, out: Tensor) -> None:
    """fp32 block maxima -> E4M3 bytes, at least 1 where a block is not zero.

    torch's conversion rounds as `e4m3.round_to_bytes` does, in a third of its time, but turns what
    rounds past 448 into NaN.
    """
    ratio = torch.div(block_amax, _SIX).div_(multiplier)
    rounded = torch.minimum(ratio, _MAX_SCALE, out=ratio).to(torch.float8_e4m3fn)
    torch.maximum(rounded.view(torch.uint8), block_amax.gt(_ZERO).view(torch.uint8), out=out)


def _round_codes(a: Tensor, code: Tensor, line: Tensor) -> None:
    """fp32 magnitudes in code units -> _MAGIC + their codes, not yet limited to 7.

    The three lines of `e2m1.encode`, each rounded by the one addition that also shifts it: a
    pass fewer for each line, and no subnormal numbers, which are slow on CPUs.
    """
    torch.add(_DOUBLED, a, alpha=2, out=code)
    torch.minimum(code, torch.add(a, _SHIFTED, out=line), out=code)
    torch.minimum(code, torch.add(_HALVED, a, alpha=0.5, out=line), out=code)


def _join(code: Tensor, free: Tensor, words: Tensor) -> None:
    """Planes of _MAGIC + nibble, fp32 [16, R, K/16] -> packed codes, int32 [2, R, K/16].

    Neighbouring planes join: 16 nibbles, 8 bytes, 4 half-words, 2 words (little-endian).
    """
    nibbles, joined = code.view(torch.int32), free.view(torch.int32)
    torch.add(nibbles[0::2], nibbles[1::2], alpha=1 << 4, out=joined[:8])
    torch.add(joined[0:8:2], joined[1:8:2], alpha=1 << 8, out=nibbles[:4])
    torch.add(nibbles[0:4:2], nibbles[1:4:2], alpha=1 << 16, out=joined[:2])
    torch.sub(joined[:2], _MAGIC_WORD, out=words)


_LOCAL = threading.local()


def _scratch(size: int) -> Tensor:
    """fp32 [size], the calling thread's own and kept: fresh pages would cost 1 ms a matrix."""
    buffer = getattr(_LOCAL, "buffer", None)
    if buffer is None or len(buffer) < size:
        _LOCAL.buffer = buffer = torch.empty(size)
    return buffer[:size]


def _tile_rows(n: int, k: int, threads: int) -> int:
    """Rows of a tile: equal shares for the threads, of about TILE values or fewer."""
    tiles = -(-n * k // (TILE * threads)) * threads
    return max(1, -(-n // max(1, tiles)))


def _share(work: Callable[[Iterator[int]], None], starts: range, threads: int) -> None:
    """Run `work` on every start, from `threads` threads, whichever is free next."""
    queue = iter(starts)  # a range's iterator is safe to share: `next` holds the GIL
    if threads == 1:
        with one_thread():
            return work(queue)
    for done in [_pool(threads).submit(work, queue) for _ in range(min(threads, len(starts)))]:
        done.result()


def _workers() -> int:
    """How many threads encode: one core is left to reading and writing.

    With two cores that makes one thread, the caller's own: two would take turns for the GIL, and
    handing a matrix over takes longer than half of it (1.50 s for SmolLM2-135M, against 1.15 s).
    """
    return min(max(1, own_threads() - 1), _MAX_THREADS)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return single_threaded(threads, "nvfp4")
