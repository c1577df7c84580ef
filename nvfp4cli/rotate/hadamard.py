"""Orthogonal matrices for the offline rotations R1 (hidden size) and R2 (head size).

Hadamard matrices come from four constructions: doubling (Sylvester 1867), the two of Paley, "On
orthogonal matrices" (1933), and for the orders 92 and 172 that of Williamson, "Hadamard's
determinant theorem and the sum of four squares" (1944). With a prime q the first three give the
orders 2^k, q + 1 for q = 3 mod 4 and 2(q + 1) for q = 1 mod 4; a Kronecker product of two Hadamard
matrices is one too.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nvfp4cli.errors import RecipeError, UnsupportedError

KINDS = ("hadamard", "block", "qr")
BLOCKS = (128, 64, 32, 16)  # a multiple of the 16 values that share an NVFP4 scale

# Four symmetric circulant matrices of order n whose squares add up to 4 n I give one of order 4 n.
# Their first rows are +1 at 0 and constant on the orbits of the multiplications by `generator` and
# by -1; one sign an orbit, ordered by their smallest members.
_WILLIAMSON = {
    92: (1, ("++++-++---+", "-+++--++-+-", "-+--+++++--", "--++-+-+---")),
    172: (6, ("++++---", "++----+", "+-+-+-+", "-++--++")),
}

_CHUNK = 1 << 18  # elements rotated at a time: 1 MiB in fp32, so temporaries stay in the cache


def supported(n: int) -> bool:
    """True where `hadamard(n)` exists."""
    return _balanced_orders(n) is not None


def hadamard(n: int) -> Tensor:
    """Hadamard matrix of order n: int8 [n, n], entries +-1, H H^T = n I. Not always symmetric.

    Raises UnsupportedError where no construction gives the order.
    """
    return torch.kron(*hadamard_factors(n))


def hadamard_factors(n: int) -> tuple[Tensor, Tensor]:
    """int8 [a, a] and [b, b] Hadamard matrices with a b = n, whose Kronecker product has order n.

    Where one matrix that is not doubled suffices, b is a power of two. Of all such pairs a + b, the
    cost of applying them, is the smallest: 8192 = 128 x 64, 2880 = 180 x 16, 11008 = 172 x 64. Only
    where it does not, both factors hold such a matrix: 1360 = 68 x 20.

    Raises UnsupportedError where no construction gives the order.
    """
    orders = _balanced_orders(n)
    if orders is None:
        raise UnsupportedError(
            f"There is no Hadamard matrix of size {n} here, because {n} is not a power of two "
            "times at most two of the orders q + 1 for a prime q = 3 mod 4, 2(q + 1) for a prime "
            f"q = 1 mod 4, 92 and 172: use {_alternatives(n)}."
        )
    left, right = orders
    return _doubled(left), _doubled(right)


def _alternatives(n: int) -> str:
    """The options that rotate size n without a Hadamard matrix of order n."""
    block = next((b for b in BLOCKS if n % b == 0), None)
    block_option = f"--rotation-kind block-{block} or " if block else ""
    return f"{block_option}--rotation-kind qr"


def _balanced_orders(n: int) -> tuple[int, int] | None:
    def preference(orders: tuple[int, int]) -> tuple[bool, int, int]:
        left, right = orders
        return not _is_power_of_two(right), left + right, right

    pairs = ((a, n // a) for a in range(1, n + 1) if n % a == 0)
    buildable = (pair for pair in pairs if all(_core_order(order) for order in pair))
    return min(buildable, key=preference, default=None)


def _core_order(n: int) -> int:
    """The smallest order of a matrix here, or 1, that times a power of two is n; 0 if none is."""
    if _is_power_of_two(n):
        return 1
    # All constructions give multiples of 4, and every candidate has the odd part of n.
    order = 4 * (n // (n & -n))
    while n % order == 0:
        if _is_paley_1(order) or _is_paley_2(order) or order in _WILLIAMSON:
            return order
        order *= 2
    return 0


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _is_paley_1(order: int) -> bool:
    return order % 4 == 0 and _is_prime(order - 1)


def _is_paley_2(order: int) -> bool:
    return order % 8 == 4 and _is_prime(order // 2 - 1)


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % p for p in range(2, math.isqrt(q) + 1))


def _doubled(n: int) -> Tensor:
    """int8 [n, n]: one matrix of the constructions (or [[1]]) doubled until it has order n."""
    order = _core_order(n)
    if order == 1:
        matrix = torch.ones(1, 1, dtype=torch.int8)
    elif order in _WILLIAMSON:
        matrix = _williamson(order)
    elif _is_paley_1(order):
        matrix = _paley_1(order - 1)
    else:
        matrix = _paley_2(order // 2 - 1)
    doubling = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    while len(matrix) < n:
        matrix = torch.kron(matrix, doubling)
    return matrix


def _paley_1(q: int) -> Tensor:
    """int8 [q + 1, q + 1] for a prime q = 3 mod 4: I + S with S skew and S S^T = q I."""
    skew = _bordered_jacobsthal(q)
    skew[1:, 0] = -1
    return skew + torch.eye(q + 1, dtype=torch.int8)


def _paley_2(q: int) -> Tensor:
    """int8 [2(q + 1), 2(q + 1)] for a prime q = 1 mod 4, from C symmetric with C C^T = q I."""
    conference = _bordered_jacobsthal(q)
    off_diagonal = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    on_diagonal = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    identity = torch.eye(q + 1, dtype=torch.int8)
    return torch.kron(conference, off_diagonal) + torch.kron(identity, on_diagonal)


def _bordered_jacobsthal(q: int) -> Tensor:
    """int8 [q + 1, q + 1] of a prime q: chi(i - j) inside a border of ones, the corner zero.

    chi is the quadratic character: 0 at 0, 1 at the squares modulo q, -1 elsewhere.
    """
    residues = torch.arange(q)
    chi = torch.full((q,), -1, dtype=torch.int8)
    chi[residues**2 % q] = 1
    chi[0] = 0
    bordered = torch.ones(q + 1, q + 1, dtype=torch.int8)
    bordered[1:, 1:] = chi[(residues[:, None] - residues) % q]
    bordered[0, 0] = 0
    return bordered


def _williamson(order: int) -> Tensor:
    """int8 [order, order] from four symmetric circulant matrices, which commute."""
    n = order // 4
    generator, rows = _WILLIAMSON[order]
    indices = torch.arange(n)[:, None] - torch.arange(n)
    a, b, c, d = (_constant_on_orbits(n, generator, signs)[indices % n] for signs in rows)
    columns = [(a, -b, -c, -d), (b, a, -d, c), (c, d, a, -b), (d, -c, b, a)]
    return torch.cat([torch.cat(column) for column in columns], dim=1)


def _constant_on_orbits(n: int, generator: int, signs: str) -> Tensor:
    """int8 [n] of +-1; see `_WILLIAMSON`."""
    row = torch.zeros(n, dtype=torch.int8)
    row[0] = 1
    for sign in signs:
        member = int((row == 0).nonzero()[0])
        while row[member] == 0:
            row[[member, -member]] = 1 if sign == "+" else -1
            member = member * generator % n
    return row


def derive_seed(seed: int, *labels: str | int) -> int:
    """63-bit seed of one purpose, e.g. ("r1",) or ("r2", layer, kv_head); stable for ever.

    SHA-256 of the JSON list of the arguments, which keeps 1 apart from "1" and "ab" from "a", "b".
    """
    digest = hashlib.sha256(json.dumps([seed, *labels]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Rotation:
    """The orthogonal matrix R = E diag(signs) H * scale, [n, n], where H = I kron left kron right.

    kind, size (n), seed, block (None unless kind is "block") and fixes_ones determine it; build it
    with `make`. signs: int8 [n]. left [a, a] and right [b, b]: int8, where a b divides n and the
    identity fills the rest; for kind "qr" right is float64 [n, n]. scale makes R orthogonal.

    E is the identity, or H^T P with x P = x[:, permutation], where permutation is int64 [n] and not
    None: for a Hadamard matrix that fixes the all-ones vector.
    """

    kind: str
    size: int
    seed: int
    block: int | None
    fixes_ones: bool
    signs: Tensor = field(repr=False, compare=False)
    left: Tensor = field(repr=False, compare=False)
    right: Tensor = field(repr=False, compare=False)
    scale: float = field(repr=False, compare=False)
    permutation: Tensor | None = field(repr=False, compare=False, default=None)

    def apply_right(self, x: Tensor) -> Tensor:
        """x @ R for x [..., n], fp32 or fp64 on any device; a new contiguous tensor."""
        y = self._output(x, axis=-1)
        signs, left, right = self.signs.to(x) * self.scale, self.left.to(x), self.right.to(x)
        permutation = None if self.permutation is None else self.permutation.to(x.device)
        for source, target in self._chunks(x, y):
            entered = source
            if permutation is not None:
                _multiply_rows(source, left.T, right.T, target)
                entered = target.index_select(1, permutation)
            _multiply_rows(entered * signs, left, right, target)
        return y

    def apply_right_transposed(self, x: Tensor) -> Tensor:
        """x @ R^T for x [..., n], the inverse of `apply_right` up to rounding."""
        if self.permutation is not None:  # with S = P diag(signs), (H^T S H)^T is H^T S^T H
            inverse = self.permutation.argsort()
            return replace(self, signs=self.signs[inverse], permutation=inverse).apply_right(x)
        y = self._output(x, axis=-1)
        signs, left, right = self.signs.to(x) * self.scale, self.left.to(x), self.right.to(x)
        for source, target in self._chunks(x, y):
            _multiply_rows(source, left.T, right.T, target)
            target.mul_(signs)
        return y

    def apply_left_transposed(self, x: Tensor) -> Tensor:
        """R^T @ x for x [n, m], fp32 or fp64 on any device; a new contiguous tensor."""
        y = self._output(x, axis=0)
        signs, left, right = self.signs.to(x) * self.scale, self.left.to(x), self.right.to(x)
        permutation = None if self.permutation is None else self.permutation.to(x.device)
        columns = max(1, _CHUNK // self.size)
        for source, target in zip(x.split(columns, 1), y.split(columns, 1), strict=True):
            entered = source
            if permutation is not None:
                entered = _multiply_columns(source, left.T, right.T).index_select(0, permutation)
            target.copy_(_multiply_columns(entered * signs[:, None], left, right))
        return y

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """R itself, [n, n]; for inspection, since applying the factors needs less."""
        product = torch.kron(self.left.double(), self.right.double())
        h = torch.kron(torch.eye(self.size // len(product), dtype=torch.float64), product)
        r = self.signs[:, None] * h * self.scale
        return (r if self.permutation is None else h.T[:, self.permutation] @ r).to(dtype)

    def _chunks(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        rows = max(1, _CHUNK // self.size)
        flat, out = x.reshape(-1, self.size), y.view(-1, self.size)
        return zip(flat.split(rows), out.split(rows), strict=True)

    def _output(self, x: Tensor, axis: int) -> Tensor:
        if x.dtype not in (torch.float32, torch.float64):
            # A fold in bf16 arithmetic is off by 3.0e-3, in fp32 by 2.2e-7.
            raise TypeError(f"rotations are applied in float32 or float64, not {x.dtype}")
        if x.shape[axis] != self.size:
            raise ValueError(f"axis {axis} of {tuple(x.shape)} is not the rotation's {self.size}")
        return torch.empty_like(x, memory_format=torch.contiguous_format)


def _multiply_rows(x: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = x (I kron left kron right) for x [m, n], left [a, a], right [b, b], a b dividing n.

    A row holds matrices X [a, b], row-major, and X becomes left^T X right: 2 n (a + b) operations
    a row where the dense product takes 2 n^2 (43 times fewer for 8192 = 128 x 64).
    """
    a, b = len(left), len(right)
    if a == 1:
        torch.matmul(x.reshape(-1, b), right, out=out.view(-1, b))
    else:
        torch.matmul(left.T, (x.reshape(-1, b) @ right).view(-1, a, b), out=out.view(-1, a, b))


def _multiply_columns(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """(I kron left kron right)^T x for x [n, m] contiguous; no axis is moved."""
    n, m = x.shape
    a, b = len(left), len(right)
    y = torch.bmm(right.T.expand(n // b, b, b), x.view(n // b, b, m))
    if a > 1:
        groups = n // (a * b)
        y = torch.bmm(left.T.expand(groups, a, a), y.view(groups, a, b * m))
    return y.view(n, m)


def make(
    kind: str, size: int, seed: int, block: int | None = None, fixes_ones: bool = False
) -> Rotation:
    """The rotation of a size, drawn from a seed.

    "hadamard": the whole size, every value spread over all channels.
    "block": one Hadamard matrix of order `block` (16, 32, 64 or 128, dividing size) along the
    diagonal; the signs run over the whole size, so the blocks differ.
    "qr": Haar-distributed, as Q diag(sign(diag(R))) of a Gaussian matrix (Mezzadri, "How to
    generate random matrices from the classical compact groups", 2007); costs a float64 [n, n].

    fixes_ones: R 1 = 1 and so 1^T R = 1^T, which makes LayerNorm(x R) = LayerNorm(x) R for a
    LayerNorm without gain and bias. The entries of a Hadamard R are then not all of one size but
    sums of random signs, nearly Gaussian: the largest of order 576 is about 5/sqrt(576).

    Signs and permutation come from SHAKE-256 of the seed: the same on every machine, with any
    number of threads and any torch. A "qr" matrix goes through torch's generator, which reads the
    low 32 bits of `seed`, and LAPACK: the same bytes only with the same libraries and threads.

    Raises RecipeError for a kind or block that does not exist, UnsupportedError for a size that
    the kind cannot do.
    """
    _check_options(kind, size, block, fixes_ones)
    one = torch.ones(1, 1, dtype=torch.int8)
    if kind == "qr":
        matrix = _haar_fixing_ones(size, seed) if fixes_ones else _haar(size, seed)
        signs = torch.ones(size, dtype=torch.int8)
        return Rotation(kind, size, seed, block, fixes_ones, signs, one, matrix, 1.0)
    # A block is small enough for a single product, which is faster than two of tiny factors.
    left, right = (one, hadamard(block)) if block else hadamard_factors(size)
    order = len(left) * len(right)
    signs, permutation, scale = _signs(size, seed), None, 1 / math.sqrt(order)
    if fixes_ones:
        # With A = H / sqrt(order), its columns negated so that the first row is 1^T / sqrt(order),
        # and the signed permutation S = P diag(signs), which fixes e1, R is A^T S A. The other
        # rows of A are orthogonal to its first, so A 1 = sqrt(order) e1, and
        # R 1 = sqrt(order) A^T S e1 = sqrt(order) A^T e1 = 1. The same holds in each block.
        signs[::order] = 1
        permutation = _permutation(size, order, seed)
        left, right, scale = left * left[0], right * right[0], 1 / order
    return Rotation(kind, size, seed, block, fixes_ones, signs, left, right, scale, permutation)


def _haar(size: int, seed: int) -> Tensor:
    """float64 [size, size]."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(size, size, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal().sign()


def _haar_fixing_ones(size: int, seed: int) -> Tensor:
    """float64 [size, size]: B diag(1, Q) B^T with Q Haar and B = I - v v^T / (1 - 1/sqrt(n)).

    v = e1 - 1/sqrt(n), of |v|^2 = 2 - 2/sqrt(n): B reflects e1 into the unit vector 1/sqrt(n).
    """
    entry = 1 / math.sqrt(size)
    v = torch.tensor([1.0] + [0.0] * (size - 1), dtype=torch.float64) - entry
    matrix = torch.block_diag(torch.ones(1, 1, dtype=torch.float64), _haar(size - 1, seed))
    for _ in range(2):  # M -> (B M)^T, twice: B M B^T
        matrix = (matrix - torch.outer(v, v @ matrix / (1 - entry))).T
    return matrix.contiguous()


def _signs(size: int, seed: int) -> Tensor:
    """int8 [size] of +-1: bit i of the SHAKE-256 stream of the seed in decimal."""
    stream = hashlib.shake_256(str(seed).encode()).digest(-(-size // 8))
    octets = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
    bits = octets[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[:size].to(torch.int8) * 2 - 1


def _permutation(size: int, order: int, seed: int) -> Tensor:
    """int64 [size]: each run of `order` indices shuffled, by 64-bit keys, behind its first."""
    octets = -(-size // 8)  # of the same stream, which `_signs` takes
    stream = hashlib.shake_256(str(seed).encode()).digest(octets + 8 * size)
    keys = [stream[i : i + 8] for i in range(octets, len(stream), 8)]
    starts = range(0, size, order)
    runs = [[i, *sorted(range(i + 1, i + order), key=keys.__getitem__)] for i in starts]
    return torch.tensor(runs).flatten()


def _check_options(kind: str, size: int, block: int | None, fixes_ones: bool) -> None:
    if kind not in KINDS:
        raise RecipeError(f"{kind!r} is no rotation kind: use one of {', '.join(KINDS)}.")
    if kind != "block" and block is not None:
        raise RecipeError(f"Rotation kind {kind} takes no block size: leave it out.")
    if kind == "block" and block not in BLOCKS:
        raise RecipeError(f"A rotation block of {block} does not exist: use 16, 32, 64 or 128.")
    if block and size % block:
        raise UnsupportedError(
            f"A rotation block of {block} does not divide the size {size}: "
            f"use {_alternatives(size)}."
        )
    if fixes_ones and size <= 2:
        raise UnsupportedError(
            f"LayerNorm allows only permutations as R1 of size {size}: use --rotate r2 or none."
        )
