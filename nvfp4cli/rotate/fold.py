"""Function-preserving edits of weights: norm gains and the rotations R1 and R2, all offline.

Row-vector convention: nn.Linear computes y = x W^T + b with W [out, in]. With an orthogonal R1
[H, H] on the residual stream h -> h R1 and g the gain of the norm before a reader:

    embedding  E' = E R1              norm    gain' = 1 (or 0 where the model multiplies by 1 + w)
    reader     W' = (W diag(g)) R1    writer  W' = R1^T W,  b' = b R1

RMSNorm(h R1) = RMSNorm(h) R1 holds only for a gain of one, which is why gains move into their
readers. A different R2 [d, d] for each KV head j, on the value path:

    v_proj rows of head j      W_j' = R2_j^T W_j,  b_j' = b_j R2_j
    o_proj columns of query head h  W_h' = W_h R2_(h // group)

QuaRot (arXiv 2404.00456), SpinQuant (arXiv 2405.16406). Embeddings are not mean-centred: that is
right for LayerNorm only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models.spec import ArchSpec, Claim
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
    """W diag(g): the gain of a norm moves into a reader. `offset` is 1 where g = 1 + w."""

    gain: str
    offset: float
    row_local = True

    @property
    def reads(self) -> tuple[str, ...]:
        """The gain."""
        return (self.gain,)

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """Multiply column k by g[k]."""
        return x * (read(self.gain).to(x) + self.offset)


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
    """x R along the last axis: readers, embeddings, and the biases of writers."""

    rotation: Rotation
    row_local = True
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[..., n] @ R."""
        return self.rotation.apply_right(x)


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
    """The value side of R2: rows (or the bias) of KV head j meet rotations[j]."""

    rotations: tuple[Rotation, ...]
    row_local = False
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: Read) -> Tensor:
        """[kv * d, K] or [kv * d]."""
        heads = x.view(len(self.rotations), -1, *x.shape[1:])  # [kv, d(, K)]
        rotated = [
            r.apply_right(head) if x.ndim == 1 else r.apply_left_transposed(head)
            for r, head in zip(self.rotations, heads, strict=True)
        ]
        return torch.cat(rotated)


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
    def of(cls, names: str, kind: str, seed: int, config: dict[str, Any]) -> "Rotations":
        """names: "none", "r1", "r2" or "r1r2"; kind: "hadamard", "qr" or "block-N".

        Raises UnsupportedError for a size that has no such matrix.
        """
        base, _, digits = kind.partition("-")
        block = int(digits) if digits else None
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        residual = None
        if "r1" in names:
            residual = make(base, hidden, derive_seed(seed, "r1"), block)
        head_dim = kv_heads = None
        if "r2" in names:
            head_dim = int(config.get("head_dim") or hidden // heads)
            kv_heads = int(config.get("num_key_value_heads") or heads)
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


def edits(
    claim: Claim, spec: ArchSpec, rotations: Rotations, shape: tuple[int, ...]
) -> tuple[Edit, ...]:
    """The edits of one tensor, in order. Empty where the rotations leave it alone.

    shape: the tensor's. Raises UnsupportedError where a rotation does not fit it, or for a norm's
    bias, which an RMSNorm does not have.
    """
    one = 1.0 if spec.norm_gain == "plain" else 0.0
    found: list[Edit] = []
    r1 = rotations.residual
    is_bias = claim.part == "bias"
    if r1 is not None:
        if claim.spec.role == "norm":
            if is_bias:
                raise UnsupportedError(
                    f"{claim.tensor} is the bias of a norm, and R1 is exact for RMSNorm only: "
                    "use --rotate none or --rotate r2."
                )
            found.append(Fill(one))
        elif claim.spec.role == "embed":
            found.append(RotateRight(r1))
        elif claim.spec.role == "reader" and not is_bias:
            assert claim.spec.norm is not None
            gain = claim.sibling(claim.spec.norm) + ".weight"
            found += [ScaleColumns(gain, 1.0 - one), RotateRight(r1)]
        elif claim.spec.role == "writer":
            found.append(RotateRight(r1) if is_bias else RotateLeft(r1))
    if rotations.head_dim is not None and claim.spec.heads and claim.layer is not None:
        _check_heads(claim, rotations, shape)
        value_path = rotations.value_path(claim.layer)
        if claim.spec.heads == "kv_rows":
            found.append(RotateHeadRows(value_path))
        elif not is_bias:
            found.append(RotateHeadColumns(value_path))
    return tuple(found)


def _check_heads(claim: Claim, rotations: Rotations, shape: tuple[int, ...]) -> None:
    assert rotations.head_dim is not None and rotations.kv_heads is not None
    width = rotations.head_dim * rotations.kv_heads
    if claim.spec.heads == "kv_rows":
        fits = shape[0] == width
    else:
        fits = claim.part == "bias" or shape[1] % width == 0
    if not fits:
        raise UnsupportedError(
            f"R2 needs {rotations.kv_heads} KV heads of {rotations.head_dim}, and {claim.tensor} "
            f"has shape {list(shape)}: config.json disagrees with the weights; use --rotate r1 or "
            "none."
        )


def apply(tensor: Tensor, changes: tuple[Edit, ...], read: Read) -> Tensor:
    """Apply edits in fp32, or in fp64 to fp64 tensors; the result is not rounded back.

    Row-local edits run on tiles of rows, which stay in the cache: beyond the result they need no
    memory. Others hold two copies of the tensor in the wide dtype.
    """
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    read = cache(read)  # a gain serves every tile
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
