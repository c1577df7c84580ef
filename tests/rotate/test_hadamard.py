"""Hadamard constructions in exact integers, and rotations against their dense matrices."""

import hashlib
import math

import pytest
import torch
from torch import Tensor

from nvfp4cli.errors import RecipeError, UnsupportedError
from nvfp4cli.rotate import hadamard as hd

# Orders of the two Kronecker factors for hidden, intermediate and head sizes of released models.
FACTORS = {
    16: (4, 4),
    32: (8, 4),
    48: (12, 4),
    64: (8, 8),
    72: (36, 2),
    80: (20, 4),
    92: (92, 1),
    96: (12, 8),
    112: (28, 4),
    128: (16, 8),
    192: (12, 16),
    256: (16, 16),
    576: (36, 16),
    768: (24, 32),
    896: (28, 32),
    960: (60, 16),
    1024: (32, 32),
    1152: (36, 32),
    1360: (68, 20),
    1536: (48, 32),
    2048: (64, 32),
    2304: (36, 64),
    2560: (40, 64),
    2880: (180, 16),
    3072: (48, 64),
    3584: (56, 64),
    4096: (64, 64),
    4608: (72, 64),
    5120: (80, 64),
    5376: (84, 64),
    6144: (96, 64),
    6656: (104, 64),
    7168: (112, 64),
    8192: (128, 64),
    10944: (684, 16),
    11008: (172, 64),
    13824: (108, 128),
    14336: (112, 128),
    18944: (148, 128),
    27648: (216, 128),
    28672: (224, 128),
    29568: (924, 32),
}
KINDS = [("hadamard", None), ("block", 16), ("block", 64), ("qr", None)]


def digest(tensor: Tensor) -> str:
    """Of an integer tensor's values in decimal, so that the machine's byte order plays no part."""
    return hashlib.sha256(" ".join(map(str, tensor.tolist())).encode()).hexdigest()[:16]


def assert_hadamard(matrix: Tensor) -> None:
    n = len(matrix)
    assert matrix.dtype == torch.int8
    assert matrix.shape == (n, n)
    assert bool((matrix.abs() == 1).all())
    # Sums of n products +-1 stay below 2^24, so fp32 holds them exactly in any order.
    exact = matrix.float()
    assert torch.equal(exact @ exact.T, n * torch.eye(n))


@pytest.mark.parametrize("n", FACTORS)
def test_factors_are_balanced_hadamard_matrices(n: int) -> None:
    left, right = hd.hadamard_factors(n)
    assert (len(left), len(right)) == FACTORS[n]
    assert hd.supported(n)
    assert_hadamard(left)
    assert_hadamard(right)


@pytest.mark.parametrize("n", [1, 2, 4, 12, 20, 28, 36, 60, 80, 92, 576, 1360])
def test_hadamard_is_the_product_of_its_factors(n: int) -> None:
    matrix = hd.hadamard(n)
    assert_hadamard(matrix)
    assert torch.equal(matrix, torch.kron(*hd.hadamard_factors(n)))


def test_every_multiple_of_16_up_to_640_is_orthogonal() -> None:
    sizes = list(range(16, 641, 16))
    assert all(hd.supported(n) for n in sizes)
    for n in sizes:
        for factor in hd.hadamard_factors(n):
            assert_hadamard(factor)


@pytest.mark.parametrize("n", [0, 3, 6, 52, 116, 1712, 13696])
def test_sizes_without_construction(n: int) -> None:
    assert not hd.supported(n)


@pytest.mark.parametrize(
    ("n", "advice"),
    [
        (13696, "use --rotation-kind block-128 or --rotation-kind qr."),
        (1712, "use --rotation-kind block-16 or --rotation-kind qr."),
        (116, "use --rotation-kind qr."),
    ],
)
def test_unsupported_size_says_what_works(n: int, advice: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        hd.make("hadamard", n, seed=0)
    sentence = str(caught.value)
    assert sentence.startswith(f"There is no Hadamard matrix of size {n} here, because ")
    assert sentence.endswith(f": {advice}")


def test_advice_works() -> None:
    rotation = hd.make("block", 13696, seed=0, block=128)
    x = torch.ones(1, 13696, dtype=torch.float64)
    assert rotation.apply_right(x).norm().item() == pytest.approx(math.sqrt(13696), rel=1e-12)
    q = hd.make("qr", 92, seed=0).dense()
    assert (q @ q.T - torch.eye(92, dtype=torch.float64)).abs().max() <= 1e-12


def test_options_that_make_no_sense() -> None:
    with pytest.raises(RecipeError, match="'random' is no rotation kind"):
        hd.make("random", 64, seed=0)
    with pytest.raises(RecipeError, match="kind hadamard takes no block size"):
        hd.make("hadamard", 64, seed=0, block=16)
    with pytest.raises(RecipeError, match="block of 8 does not exist"):
        hd.make("block", 64, seed=0, block=8)
    with pytest.raises(UnsupportedError, match="block of 128 does not divide the size 576"):
        hd.make("block", 576, seed=0, block=128)


@pytest.mark.parametrize("fixes_ones", [False, True])
@pytest.mark.parametrize(("kind", "block"), KINDS)
@pytest.mark.parametrize("size", [64, 192, 576])
def test_rotation_is_orthogonal(kind: str, block: int | None, size: int, fixes_ones: bool) -> None:
    dense = hd.make(kind, size, 3, block, fixes_ones).dense()
    assert dense.dtype == torch.float64
    identity = torch.eye(size, dtype=torch.float64)
    assert (dense @ dense.T - identity).abs().max() <= 1e-12
    assert not torch.allclose(dense, identity)


@pytest.mark.parametrize("fixes_ones", [False, True])
@pytest.mark.parametrize(("kind", "block"), KINDS)
@pytest.mark.parametrize("size", [64, 192, 576])  # 192 = 12 x 16: left is not symmetric
def test_applications_equal_the_dense_product(
    kind: str, block: int | None, size: int, fixes_ones: bool
) -> None:
    rotation = hd.make(kind, size, 3, block, fixes_ones)
    dense = rotation.dense()
    x = torch.randn(2, 5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tall = x[0].T  # [n, m], not contiguous
    for got, want in (
        (rotation.apply_right(x), x @ dense),
        (rotation.apply_right_transposed(x), x @ dense.T),
        (rotation.apply_left_transposed(tall), dense.T @ tall),
        (rotation.apply_right_transposed(rotation.apply_right(x)), x),
        (rotation.apply_right(x[0, 0]), x[0, 0] @ dense),
        (rotation.apply_right(x.mT.contiguous().mT[0]), x[0] @ dense),  # not contiguous
        (rotation.apply_right_transposed(x.mT.contiguous().mT[0]), x[0] @ dense.T),
    ):
        assert got.is_contiguous()
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-13 * want.abs().max()


@pytest.mark.parametrize("fixes_ones", [False, True])
def test_chunks_do_not_change_the_result(fixes_ones: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = hd.make("hadamard", 48, seed=0, fixes_ones=fixes_ones)
    x = torch.randn(7, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(hd, "_CHUNK", 2 * 48)  # four chunks, the last of one row
    expected = x @ rotation.dense()
    assert (rotation.apply_right(x) - expected).abs().max() <= 1e-13 * expected.abs().max()
    tall = rotation.apply_left_transposed(x.T.contiguous())
    assert (tall - expected.T).abs().max() <= 1e-13 * expected.abs().max()
    assert (rotation.apply_right_transposed(expected) - x).abs().max() <= 1e-13 * x.abs().max()


def test_float32_stays_float32_and_within_its_rounding() -> None:
    rotation = hd.make("hadamard", 576, seed=3)
    x = torch.randn(8, 576, generator=torch.Generator().manual_seed(1))
    got = rotation.apply_right(x)
    assert got.dtype == torch.float32
    # A sum of n terms errs by at most n eps sum|terms| = n eps ||x||_1 / sqrt(n), here for
    # two sums in a row (36 + 16 terms), the scaled sign and its product.
    bound = (36 + 16 + 2) * torch.finfo(torch.float32).eps * x.double().abs().sum(-1) / 24
    assert bool(((got - x.double() @ rotation.dense()).abs().amax(-1) <= bound).all())


def test_float32_that_fixes_ones_is_within_its_rounding() -> None:
    rotation = hd.make("hadamard", 576, seed=3, fixes_ones=True)
    x = torch.randn(8, 576, generator=torch.Generator().manual_seed(1))
    got = rotation.apply_right(x)
    assert got.dtype == torch.float32
    # Every intermediate value is at most ||x||_1, and errs by that times eps for each of the
    # 36 + 16 terms it sums; the way back sums 576 of them, divided by 576.
    bound = (2 * (36 + 16) + 2) * torch.finfo(torch.float32).eps * x.double().abs().sum(-1)
    assert bool(((got - x.double() @ rotation.dense()).abs().amax(-1) <= bound).all())


@pytest.mark.parametrize("fixes_ones", [False, True])
def test_input_is_left_alone_and_may_be_empty(fixes_ones: bool) -> None:
    rotation = hd.make("block", 32, seed=0, block=16, fixes_ones=fixes_ones)
    x = torch.arange(3 * 32).view(3, 32).float()
    for apply in (rotation.apply_right, rotation.apply_right_transposed):
        apply(x)
        assert torch.equal(x, torch.arange(3 * 32).view(3, 32).float())
        assert apply(torch.empty(0, 32)).shape == (0, 32)
    tall = x.T.contiguous()
    rotation.apply_left_transposed(tall)
    assert torch.equal(tall, x.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    rotation = hd.make("hadamard", 16, seed=0)
    x = torch.ones(16, 16, dtype=dtype)
    for apply in (
        rotation.apply_right,
        rotation.apply_right_transposed,
        rotation.apply_left_transposed,
    ):
        with pytest.raises(TypeError, match="float32 or float64"):
            apply(x)


def test_other_shapes_are_refused() -> None:
    rotation = hd.make("hadamard", 16, seed=0)
    with pytest.raises(ValueError, match=r"axis -1 of \(16, 32\)"):
        rotation.apply_right(torch.ones(16, 32))
    with pytest.raises(ValueError, match=r"axis 0 of \(32, 16\)"):
        rotation.apply_left_transposed(torch.ones(32, 16))


def test_blocks_differ() -> None:
    dense = hd.make("block", 64, seed=0, block=16).dense()
    blocks = [dense[i : i + 16, i : i + 16] for i in range(0, 64, 16)]
    assert torch.equal(torch.block_diag(*blocks), dense)
    assert len({block.numpy().tobytes() for block in blocks}) == 4
    assert all(torch.equal(b.abs(), torch.full((16, 16), 0.25).double()) for b in blocks)


def test_whole_hadamard_spreads_every_channel() -> None:
    dense = hd.make("hadamard", 576, seed=0).dense()
    assert torch.equal(dense.abs(), torch.full_like(dense, 1 / math.sqrt(576)))


def test_same_seed_same_bytes_where_ones_are_fixed() -> None:
    rotation = hd.make("hadamard", 576, seed=0, fixes_ones=True)
    assert rotation.permutation is not None
    assert rotation.permutation[:8].tolist() == [0, 222, 206, 195, 296, 317, 566, 1]
    assert digest(rotation.permutation) == "268d9ce75e03a3c2"
    assert rotation.signs[:4].tolist() == [1, 1, 1, 1]
    assert torch.equal(rotation.signs[1:], hd.make("hadamard", 576, seed=0).signs[1:])
    blocks = hd.make("block", 576, seed=0, block=64, fixes_ones=True)
    assert blocks.permutation is not None
    assert digest(blocks.permutation) == "d6e6bc0bee664805"
    other = hd.make("hadamard", 576, seed=1, fixes_ones=True)
    assert other.permutation is not None
    assert not torch.equal(other.permutation, rotation.permutation)


def test_same_seed_same_bytes() -> None:
    signs = hd.make("hadamard", 576, seed=0).signs
    assert signs.dtype == torch.int8
    assert signs[:16].tolist() == [-1, 1, 1, 1, 1, 1, 1, -1, 1, 1, -1, 1, -1, -1, -1, 1]
    assert hashlib.sha256(signs.numpy().tobytes()).hexdigest()[:16] == "23aee458df27f6e9"
    assert torch.equal(hd.make("block", 576, seed=0, block=64).signs, signs)
    assert not torch.equal(hd.make("hadamard", 576, seed=1).signs, signs)


def test_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = [hd.make(kind, 64, seed=5, block=block).dense() for kind, block in KINDS]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    second = [hd.make(kind, 64, seed=5, block=block).dense() for kind, block in KINDS]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_qr_is_the_unique_factor_with_positive_diagonal() -> None:
    q = hd.make("qr", 32, seed=9).right
    gaussian = torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    r = q.T @ gaussian
    assert r.tril(-1).abs().max() <= 1e-13 * gaussian.norm()
    assert bool((r.diagonal() > 0).all())


def test_rotations_compare_by_what_determines_them() -> None:
    assert hd.make("hadamard", 32, seed=1) == hd.make("hadamard", 32, seed=1)
    assert hd.make("hadamard", 32, seed=1) != hd.make("hadamard", 32, seed=2)
    for kind in ("hadamard", "qr"):
        fixing = hd.make(kind, 32, seed=1, fixes_ones=True)
        assert fixing == hd.make(kind, 32, seed=1, fixes_ones=True)
        assert fixing != hd.make(kind, 32, seed=1)


def test_derived_seeds_are_literal() -> None:
    assert hd.derive_seed(0, "r1") == 1700898572754852806
    assert hd.derive_seed(0, "r2", 3, 1) == 2039520179165175247
    assert hd.derive_seed(0) != hd.derive_seed(1)


def test_derived_seeds_do_not_collide() -> None:
    labels = [("r1",), ("r", 1), ("r", "1"), ("r1", ""), ("r2", 1, 23), ("r2", 12, 3)]
    labels += [("r2", layer, head) for layer in range(128) for head in range(16)]
    seeds = {hd.derive_seed(seed, *label) for seed in (0, 1) for label in set(labels)}
    assert len(seeds) == 2 * len(set(labels))
    assert all(0 <= seed < 2**63 for seed in seeds)
    # What reaches the generator: its low 32 bits.
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)
