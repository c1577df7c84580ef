import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nvfp4cli.formats import e4m3
from nvfp4cli.formats.nvfp4 import GlobalScale, dequantize
from nvfp4cli.kernels import amax, quantize, quantize_cpu


@pytest.fixture
def two_threads(monkeypatch):
    """Tiles of a few rows on two worker threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(quantize_cpu, "TILE", 1000)
    torch.set_num_threads(3)  # one is left to reading and writing
    yield
    torch.set_num_threads(before)


def test_one_tile_gives_the_reference_bytes(case, assert_reference, poison):
    assert_reference(quantize(*case), case)


def test_many_tiles_give_the_reference_bytes(case, assert_reference, poison, two_threads):
    assert_reference(quantize(*case), case)


def test_the_packed_bytes_of_ties_are_the_specified_ones():
    row = [6, 1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5]
    q = quantize(torch.tensor([row]), GlobalScale.from_amax(6.0))
    assert bytes(q.packed[0].tolist()).hex(" ") == "27 20 42 64 86 aa cc ee"
    assert q.block_scale.view(torch.uint8).tolist() == [[0x7E]]


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0)])
def test_an_empty_matrix_keeps_its_shape(shape):
    q = quantize(torch.empty(shape), GlobalScale(1.0, 1.0))
    assert q.shape == shape
    assert q.block_scale.shape == (shape[0], shape[1] // 16)
    assert dequantize(q).shape == shape


def test_columns_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="16"):
        quantize(torch.zeros(2, 24), GlobalScale(1.0, 1.0))


@pytest.fixture
def matrix():
    """Nineteen tiles of `two_threads`, and a scale."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    return weight.bfloat16(), GlobalScale.from_amax(8.0)


def test_inference_mode_and_parameters(matrix, assert_reference, two_threads):
    weight, scale = matrix
    parameter = torch.nn.Parameter(weight)
    assert_reference(quantize(parameter, scale), matrix)
    with torch.inference_mode():
        answer = quantize(parameter, scale)
    assert_reference(answer, matrix)


def test_several_callers_at_once(matrix, assert_reference, two_threads):
    with ThreadPoolExecutor(4) as callers:
        answers = list(callers.map(lambda _: quantize(*matrix), range(8)))
    for answer in answers:
        assert_reference(answer, matrix)


def test_threads_outside_the_pool_keep_their_setting(two_threads):
    quantize_cpu._pool.cache_clear()
    quantize(torch.ones(100, 64), GlobalScale.from_amax(1.0))
    seen = [torch.get_num_threads()]
    newborn = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    newborn.start()
    newborn.join()
    assert seen == [3, 3]


def test_an_error_in_a_worker_reaches_the_caller(two_threads, monkeypatch):
    def fail(*_):
        raise MemoryError("no scratch")

    monkeypatch.setattr(quantize_cpu, "_round_codes", fail)
    with pytest.raises(MemoryError, match="no scratch"):
        quantize(torch.ones(100, 64), GlobalScale.from_amax(1.0))


def test_one_worker_is_the_calling_thread_which_keeps_its_setting(matrix, assert_reference):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_reference(quantize(*matrix), matrix)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_block_scales_are_rounded_as_the_reference_does():
    """Every step of 2^-10 of an octave in E4M3's range and beyond, and the neighbours of ties."""
    bits = torch.arange(0x30000000, 0x44800000, 1 << 13, dtype=torch.int32)
    ratio = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    out = torch.empty(len(ratio), dtype=torch.uint8)
    quantize_cpu._round_scales(ratio * 6, torch.tensor(1.0), out)
    expected = e4m3.round_to_bytes(ratio * 6 / 6)
    assert torch.equal(out, expected.clamp(min=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_amax_shows_a_value_that_is_not_finite(dtype, bad, two_threads):
    weight = torch.randn(64, 512).to(dtype)
    assert amax(weight) == weight.abs().max().item()
    weight[40, 311] = bad
    assert str(amax(weight)) == str(abs(bad))


def test_a_matrix_on_the_cpu_needs_no_triton():
    code = (
        "import sys, torch; from nvfp4cli.formats.nvfp4 import GlobalScale;"
        "from nvfp4cli.kernels import quantize;"
        "quantize(torch.ones(1, 16), GlobalScale(1.0, 1.0));"
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
