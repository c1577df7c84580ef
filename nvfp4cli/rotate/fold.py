"""Function-preserving edits of weights: norm gains and the rotations R1 and R2, all offline.

Row-vector convention: nn.Linear computes y = x W^T + b with W [out, in]. With an orthogonal R1
[H, H] on the residual stream h -> h R1 and g the gain of the norm before a reader:

    embedding  E' = E R1              norm    gain' = 1 (or 0 where the model multiplies by 1 + w)
    reader     W' = (W diag(g)) R1    writer  W' = R1^T W,  b' = b R1

RMSNorm(h R1) = RMSNorm(h) R1 holds only for a gain of one, which is why gains move into their
readers. A different R2 [d, d] for each KV head j, on the value path:

    v_proj rows of head j      W_j' = R2_j^T W_j,  b_j' = b_j R2_j
    o_proj columns of query head h  W_h' = W_h R2_(h // group)

A LayerNorm subtracts the mean, with which only an R1 commutes that fixes the vector of ones; its
bias moves to b' = (b / g) R1. A joiner, whose input is several normed streams side by side, is a
reader in each part of its columns and a writer in its rows. QuaRot (arXiv 2404.00456), SpinQuant
(arXiv 2405.16406).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from nvfp4cli.errors import UnsupportedError, WeightError
from nvfp4cli.models.claims import Claim
from nvfp4cli.models.modules import NO_NORM
from nvfp4cli.models.sizes import Sizes
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.rotate.hadamard import Rotation, derive_seed, make

Read = Callable[[str], Tensor]

_TILE = 1 << 18  # values in a tile of rows: 1 MiB in fp32


class Edit(Protocol):
    """A change of one tensor, computed in fp32 or wider."""

    @property
    def row_local(self) -> bool:
        """True if each output row depends on the same input row only."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of other tensors that the edit needs."""

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """x: fp32 or fp64, [N, K] or, for a bias, [N]. Returns the same shape and dtype."""


@dataclass(frozen=True)
class ScaleColumns:
    """W diag(g): gains of norms move into a reader. `offset` is 1 where g = 1 + w."""

    gains: tuple[str, ...]  # of a joiner one for each part of its columns
    offset: float
    row_local = True

    @property
    def reads(self) -> tuple[str, ...]:
        """The gains."""
        return self.gains

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """Multiply column k by g[k]."""
        return x * (torch.cat([read(gain).to(x) for gain in self.gains]) + self.offset)


@dataclass(frozen=True)
class DivideByGain:
    """b / g: the bias of a norm whose gain becomes the neutral one."""

    bias: str
    gain: str
    offset: float
    row_local = True

    @property
    def reads(self) -> tuple[str, ...]:
        """The gain."""
        return (self.gain,)

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[H]. Raises WeightError where a gain of zero hides a bias."""
        gain = read(self.gain).to(x) + self.offset
        if lost := int(((gain == 0) & (x != 0)).sum()):
            raise WeightError(
                f"{self.gain} is zero at {lost} places where {self.bias} is not, which R1 cannot "
                "move: use --rotate r2 or none."
            )
        return torch.where(gain == 0, 0.0, x / gain)


@dataclass(frozen=True)
class Fill:
    """A folded gain becomes the neutral one."""

    value: float
    row_local = True
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """A constant tensor."""
        return torch.full_like(x, self.value)


@dataclass(frozen=True)
class RotateRight:
    """x R along the last axis: readers, embeddings, and the biases of writers.

    Where the axis holds several streams side by side, as a joiner's does, each is rotated.
    """

    rotation: Rotation
    row_local = True
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[..., n] @ R, or [..., m n] @ (I kron R)."""
        if x.shape[-1] == self.rotation.size:
            return self.rotation.apply_right(x)
        return self.rotation.apply_right(x.unflatten(-1, (-1, self.rotation.size))).flatten(-2)


@dataclass(frozen=True)
class RotateLeft:
    """R^T W: writers."""

    rotation: Rotation
    row_local = False
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """R^T @ [n, K]."""
        return self.rotation.apply_left_transposed(x)


@dataclass(frozen=True)
class RotateHeadRows:
    """The value side of R2: rows (or the bias) of KV head j meet rotations[j].

    Head j is rows start + j * pitch to that plus d; the others stay.
    """

    rotations: tuple[Rotation, ...]
    start: int
    pitch: int
    row_local = False
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[N, K] or [N]."""
        y = x.clone()
        for j, rotation in enumerate(self.rotations):
            first = self.start + j * self.pitch
            head = x[first : first + rotation.size]
            turned = (
                rotation.apply_right(head) if x.ndim == 1 else rotation.apply_left_transposed(head)
            )
            y[first : first + rotation.size] = turned
        return y


@dataclass(frozen=True)
class RotateHeadColumns:
    """The output side of R2: columns of the query heads served by KV head j meet rotations[j]."""

    rotations: tuple[Rotation, ...]
    row_local = True
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[N, query_heads * d]."""
        kv = len(self.rotations)
        groups = x.view(x.shape[0], kv, -1, self.rotations[0].size)  # [N, kv, group, d]
        rotated = [r.apply_right(groups[:, j]) for j, r in enumerate(self.rotations)]
        return torch.stack(rotated, dim=1).view_as(x)


@dataclass(frozen=True)
class Rotations:
    """Which rotations a run applies, and their matrices.

    residual: R1 or None. head_dim and kv_heads are those of R2, or None without it.
    """

    kind: str
    seed: int
    block: int | None
    residual: Rotation | None
    head_dim: int | None
    kv_heads: int | None

    @classmethod
    def of(cls, names: str, kind: str, seed: int, spec: ArchSpec, sizes: Sizes) -> "Rotations":
        """names: "none", "r1", "r2" or "r1r2"; kind: "hadamard", "qr" or "block-N".

        Raises UnsupportedError for a size that has no such matrix.
        """
        base, _, digits = kind.partition("-")
        block = int(digits) if digits else None
        residual = None
        if "r1" in names:
            seed_of_r1 = derive_seed(seed, "r1")
            fixes_ones = spec.norm_kind == "layer"
            residual = make(base, sizes["hidden_size"], seed_of_r1, block, fixes_ones)
        head_dim = kv_heads = None
        if "r2" in names:
            head_dim = sizes.of(spec.value_path["head_dim"])
            kv_heads = sizes.of(spec.value_path["heads"])
            make(base, head_dim, 0, block)  # an unsupported size is said now
        return cls(kind, seed, block, residual, head_dim, kv_heads)

    def value_path(self, layer: int) -> tuple[Rotation, ...]:
        """R2 of a layer, one matrix for each KV head."""
        assert self.head_dim is not None and self.kv_heads is not None
        base = self.kind.partition("-")[0]
        return tuple(
            make(base, self.head_dim, derive_seed(self.seed, "r2", layer, head), self.block)
            for head in range(self.kv_heads)
        )

    def facts(self) -> dict[str, Any]:
        """What is stored in the output and shown by `inspect`."""
        sizes = {}
        if self.residual is not None:
            sizes["r1"] = self.residual.size
        if self.head_dim is not None:
            sizes["r2"] = self.head_dim
        return {"kind": self.kind if sizes else "none", "seed": self.seed, "sizes": sizes}


def check(names: str, spec: ArchSpec, claims: Iterable[Claim | None]) -> None:
    """Raise UnsupportedError where a rotation does not preserve the function of the model."""
    found = [claim for claim in claims if claim is not None]
    if "r1" in names:
        reason = spec.refuse.get("r1")
        if after := next((c.tensor for c in found if c.spec.role == "post_norm"), None):
            reason = f"{after} is a gain between a sublayer and the residual stream"
        if reason:
            raise UnsupportedError(
                f"R1 does not hold for {spec.model_type}: {reason}; use --rotate r2 or none."
            )
    if "r2" in names:
        reason = spec.refuse.get("r2")
        if not any(claim.spec.heads for claim in found):
            reason = reason or "none of its tensors is a plain value projection"
        if reason:
            raise UnsupportedError(
                f"R2 does not hold for {spec.model_type}: {reason}; use --rotate r1 or none."
            )
    if "r1" in names and "mtp" in spec.refuse and (m := [c.tensor for c in found if c.mtp]):
        raise UnsupportedError(
            f"R1 cannot be folded into the layers of {spec.model_type} that predict further "
            f"tokens ({m[0]}): {spec.refuse['mtp']}; leave them out with --mtp drop, or use "
            "--rotate none or r2."
        )


def edits(
    claim: Claim, spec: ArchSpec, rotations: Rotations, sizes: Sizes, shape: tuple[int, ...]
) -> tuple[Edit, ...]:
    """The edits of one tensor, in order. Empty where the rotations leave it alone.

    They are of a matrix [out, in], or of [out], whatever the tensor holds: see `models.pieces`.
    shape: of that matrix. Raises UnsupportedError where a rotation does not fit it, or for the
    bias of an RMSNorm, which has none.
    """
    found: list[Edit] = []
    if rotations.residual is not None:
        found += _residual_edits(claim, spec, rotations.residual)
    if rotations.head_dim is not None and claim.spec.heads and not claim.mtp:
        assert claim.layer is not None and rotations.kv_heads is not None
        value_path = rotations.value_path(claim.layer)
        if claim.spec.heads == "kv_rows":
            start, pitch = 0, rotations.head_dim
            if rows := claim.spec.value_rows:
                start, pitch = sizes.of(rows.start), sizes.of(rows.pitch)
            end = start + (rotations.kv_heads - 1) * pitch + rotations.head_dim
            whole = claim.spec.value_rows is None
            _check_heads(claim, rotations, shape, shape[0] == end if whole else shape[0] >= end)
            found.append(RotateHeadRows(value_path, start, pitch))
        elif claim.part == "weight":
            width = rotations.head_dim * rotations.kv_heads
            _check_heads(claim, rotations, shape, shape[1] % width == 0)
            found.append(RotateHeadColumns(value_path))
    return tuple(found)


def _residual_edits(claim: Claim, spec: ArchSpec, r1: Rotation) -> list[Edit]:
    offset = 1.0 if spec.norm_gain == "one_plus" else 0.0
    is_bias = claim.part == "bias"
    match claim.spec.role:
        case "norm" if is_bias:
            if spec.norm_kind == "rms":
                raise UnsupportedError(
                    f"{claim.tensor} is the bias of an RMSNorm, which R1 does not know: use "
                    "--rotate none or --rotate r2."
                )
            gain = claim.module + (claim.spec.suffixes.weight or "")
            return [DivideByGain(claim.tensor, gain, offset), RotateRight(r1)]
        case "norm":
            return [Fill(1.0 - offset)]
        case "embed":
            return [RotateRight(r1)]
        case "reader" | "joiner" if not is_bias:
            gains = tuple(f"{claim.sibling(n)}.weight" for n in claim.spec.norm if n != NO_NORM)
            found: list[Edit] = [ScaleColumns(gains, offset)] if gains else []
            found.append(RotateRight(r1))
            return [*found, RotateLeft(r1)] if claim.spec.role == "joiner" else found
        case "writer" | "joiner":
            return [RotateRight(r1) if is_bias else RotateLeft(r1)]
        case _:
            return []


def _check_heads(claim: Claim, rotations: Rotations, shape: tuple[int, ...], fits: bool) -> None:
    if not fits:
        raise UnsupportedError(
            f"R2 needs {rotations.kv_heads} KV heads of {rotations.head_dim}, and {claim.tensor} "
            f"has shape {list(shape)}: config.json disagrees with the weights; use --rotate r1 or "
            "none."
        )


def apply(
    tensor: Tensor, changes: tuple[Edit, ...], read: Read, *, transposed: bool = False
) -> Tensor:
    """Apply edits in fp32, or in fp64 to fp64 tensors; the result is not rounded back.

    tensor: a matrix [out, in], [in, out] if transposed, such matrices [E, ., .], or a bias. Returns
    the same form. Row-local edits run on tiles of rows, which stay in the cache: beyond the result
    they need no memory. Others hold two copies of the tensor in the wide dtype.
    """
    if tensor.ndim == 3 and changes:
        return torch.stack([apply(m, changes, read, transposed=transposed) for m in tensor])
    if transposed and tensor.ndim == 2:
        return apply(tensor.T, changes, read).T
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    read = cache(read)  # a gain serves every tile
    tensor = tensor.contiguous()
    if tensor.ndim != 2 or not all(change.row_local for change in changes):
        return _chain(tensor.to(wide), changes, read)
    result = torch.empty_like(tensor, dtype=wide, memory_format=torch.contiguous_format)
    rows = max(1, _TILE // max(1, tensor.shape[1]))
    for source, target in zip(tensor.split(rows), result.split(rows), strict=True):
        target.copy_(_chain(source.to(wide), changes, read))
    return result


def _chain(x: Tensor, changes: tuple[Edit, ...], read: Read) -> Tensor:
    for change in changes:
        x = change.apply(x, read)
    return x
