"""The 16 codes, their ties and their order in a byte."""

import pytest
import torch

from nvfp4cli.formats import e2m1

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}  # midpoint -> even code


def codes(*values: float) -> list[int]:
    return e2m1.encode(torch.tensor(values)).tolist()


def test_sixteen_codes() -> None:
    decoded = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    assert decoded.tolist() == GRID + [-value for value in GRID]
    assert decoded.dtype == torch.float32
    assert codes(*GRID) == list(range(8))
    assert codes(*(-value for value in GRID[1:])) == list(range(9, 16))


def test_e2m1_ties_go_to_the_even_code() -> None:
    assert codes(*TIES) == list(TIES.values())
    assert codes(*(-tie for tie in TIES)) == [8 + code for code in TIES.values()]


@pytest.mark.parametrize("tie", TIES)
def test_beside_a_tie_the_nearer_value_wins(tie: float) -> None:
    middle = torch.tensor(tie)
    upper = sum(value < tie for value in GRID)
    below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, middle * 2)
    assert codes(below.item(), above.item()) == [upper - 1, upper]


def test_saturates_and_keeps_the_sign_of_what_rounds_to_zero() -> None:
    assert codes(6.0, 7.0, 448.0, 3.4e38, -1e30) == [7, 7, 7, 7, 15]
    assert codes(0.0, -0.0, 0.1, -0.1, 1e-45, -1e-45) == [0, 0, 0, 8, 0, 8]


def test_every_bf16_value_in_range_is_nearest_even() -> None:
    patterns = torch.arange(0, 0x4100, dtype=torch.int32).to(torch.int16)  # 0 to 8
    values = patterns.view(torch.bfloat16).to(torch.float64)
    distance = (values[:, None] - torch.tensor(GRID, dtype=torch.float64)).abs()
    distance[:, 1::2] += 1e-12  # of two equally near codes the even one
    assert torch.equal(e2m1.encode(values.float()).long(), distance.argmin(1))


def test_even_element_in_the_low_nibble() -> None:
    unpacked = torch.tensor([[1, 2, 3, 4], [15, 0, 8, 7]], dtype=torch.uint8)
    packed = e2m1.pack(unpacked)
    assert packed.tolist() == [[0x21, 0x43], [0x0F, 0x78]]
    assert e2m1.swap_nibbles(packed).tolist() == [[0x12, 0x34], [0xF0, 0x87]]
    assert torch.equal(e2m1.unpack(packed), unpacked)


def test_every_byte_survives_unpack_and_pack() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(e2m1.pack(e2m1.unpack(every)), every)
    assert torch.equal(e2m1.swap_nibbles(e2m1.swap_nibbles(every)), every)
