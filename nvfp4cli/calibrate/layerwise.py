"""Calibration text through a model, one decoder layer in memory at a time.

Two models go through the text side by side, batch by batch: the unquantised one, and the one that
will be served, whose weights and activations are rounded as far as it has come. Within a layer the
matrices are rounded in the order in which they are computed with, so each sees what the served
layer gives it.

A layer is run again for every matrix. What has been multiplied once is remembered, as far as memory
allows: the results are the same, and most of the work is those products.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from nvfp4cli.calibrate.moments import Moments, Seen
from nvfp4cli.calibrate.statistics import across_experts
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.runtime.cache import Observed, larger
from nvfp4cli.runtime.linears import Linears, Site
from nvfp4cli.runtime.matrices import Matrix, matrices, placed
from nvfp4cli.runtime.parts import Block, Parts

Group = tuple[str, ...]  # names of matrices with one input and one global scale


@dataclass(frozen=True)
class Split:
    """A matrix that is served with a low-rank branch beside it; fp32 [out, in] both.

    weight: with the branch. branch: the part of it that reads inputs before they are rounded.
    """

    weight: Tensor
    branch: Tensor


# What has been seen of a group and its matrices, fp32 [out, in] -> what is served instead of them.
Round = Callable[[Group, list[Tensor], Seen], Sequence[Tensor | Split]]
# A group and the largest magnitude of its input, or of the inputs of all experts of a layer -> what
# the served layer makes of an input.
Activation = Callable[[Group, float], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Manner:
    """How to calibrate.

    both: run the unquantised model too. rounded: activations are rounded; their largest magnitude
    is looked for first. remembered: bytes of products that may be kept. moments: bytes of
    second moments that may be held at a time, of many experts.
    """

    both: bool
    rounded: bool
    remembered: int
    moments: int


class _Enough(Exception):
    """Every input that was wanted has been seen."""


class _Recall:
    """Products of one layer that are computed already, within a limit that all batches share."""

    def __init__(self, limit: int) -> None:
        self.limit = self._left = limit
        self._kept: dict[tuple[int, str, int], Tensor] = {}

    def get(self, batch: int, name: str, call: int) -> Tensor | None:
        return self._kept.get((batch, name, call))

    def put(self, batch: int, name: str, call: int, product: Tensor) -> None:
        if product.nbytes <= self._left:
            self._left -= product.nbytes
            self._kept[batch, name, call] = product


@dataclass
class _Stream:
    """One model on its way through a layer.

    hidden: of each batch. activations: by operand, what becomes of inputs. settled: operands whose
    products stay what they are.
    """

    block: Block
    hidden: list[Tensor]
    found: dict[str, Matrix]
    recall: _Recall
    settled: set[str] = field(default_factory=set)
    activations: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ahead: dict[int, tuple[dict[str, Tensor], Tensor]] = {}
        # An operand that holds several matrices goes by the first of them.
        names: dict[int, str] = {}
        for name, one in self.found.items():
            names.setdefault(one.operand.data_ptr(), name)
        self.operand = {name: names[one.operand.data_ptr()] for name, one in self.found.items()}
        self._sites = {name: Site(name, self.found[name].operand) for name in names.values()}
        self._branches: dict[str, dict[str, Tensor]] = {}  # by operand and matrix

    def replace(self, name: str, served: Tensor | Split) -> None:
        """Compute with another matrix from now on."""
        one, operand = self.found[name], self.operand[name]
        one.values.copy_(served.weight if isinstance(served, Split) else served)
        self.settled.add(operand)
        # Where inputs are not rounded, the sum is all that there is to compute with.
        if isinstance(served, Split) and operand in self.activations:
            own = self._branches.setdefault(operand, {})
            own[name] = served.branch
            branch = placed((self.found[name], values) for name, values in own.items())
            self._sites[operand] = Site(operand, one.operand, branch)

    def look_ahead(self) -> None:
        """Go through the layer once where nothing in it changes any more, as memory allows.

        The inputs of all operands but those of experts are kept, and what the layer puts out.
        """
        left = self.recall.limit
        for batch in range(len(self.hidden)):
            seen: dict[str, Tensor] = {}

            def see(name: str, x: Tensor, seen: dict[str, Tensor] = seen) -> None:
                if across_experts(name) == name:
                    seen[name] = x

            output = self._run(batch, see, remember=False)
            # Matrices that are given the same tensor keep it once.
            left -= output.nbytes + sum({x.data_ptr(): x.nbytes for x in seen.values()}.values())
            if left < 0:
                break
            self._ahead[batch] = seen, output

    def inputs(self, batch: int, wanted: Sequence[str], *, whole: bool) -> dict[str, Tensor]:
        """What operands are given, [tokens, K]; an expert that none reaches is left out.

        whole: run the layer to its end, since the operands are called by turns with later ones.
        """
        if batch in self._ahead:
            known, _ = self._ahead[batch]
            return {name: known[name] for name in wanted if name in known}
        seen: dict[str, list[Tensor]] = {}

        def see(name: str, x: Tensor) -> None:
            if name in wanted:
                seen.setdefault(name, []).append(x)
                if not whole and len(seen) == len(wanted):
                    raise _Enough

        with suppress(_Enough):
            self._run(batch, see)
        return {name: torch.cat(parts) for name, parts in seen.items()}

    def order(self) -> list[str]:
        """The operands as they are first called, on the first batch."""
        called: dict[str, None] = {}
        self._run(0, lambda name, x: called.setdefault(name))
        return list(called)

    def advance(self, cache: Observed | None = None) -> None:
        """Replace the hidden states by what the layer makes of them."""
        for batch in range(len(self.hidden)):
            if batch in self._ahead:
                self.hidden[batch] = self._ahead.pop(batch)[1]
            else:
                self.hidden[batch] = self._run(batch, lambda name, x: None, cache)

    @torch.no_grad()
    def _run(
        self,
        batch: int,
        see: Callable[[str, Tensor], object],
        cache: Observed | None = None,
        *,
        remember: bool = True,
    ) -> Tensor:
        recall = _OfBatch(self.recall, batch)

        def change(site: Site, x: Tensor) -> Tensor | None:
            see(site.name, x)
            recall.settled = recall.settled and site.name in self.settled
            act = self.activations.get(site.name)
            return None if act is None else act(x)

        with Linears(self._sites.values(), change, recall if remember else None):
            return self.block(self.hidden[batch], cache)


@dataclass
class _OfBatch:
    """What one pass of a batch may remember: all until a matrix is met that may still change."""

    recall: _Recall
    batch: int
    settled: bool = True

    def get(self, name: str, call: int) -> Tensor | None:
        return self.recall.get(self.batch, name, call) if self.settled else None

    def put(self, name: str, call: int, product: Tensor) -> None:
        if self.settled:
            self.recall.put(self.batch, name, call, product)


class Walk:
    """The way of a calibration text through the layers of a model.

    batches: int64 tokens [B, T]. held_out: how many of them, the last, no code is chosen by.
    """

    def __init__(
        self,
        parts: Parts,
        spec: ArchSpec,
        batches: Sequence[Tensor],
        held_out: int,
        manner: Manner,
    ) -> None:
        self._parts, self._spec, self._manner = parts, spec, manner
        self._fit = len(batches) - held_out
        self._served = parts.enter(batches)
        self._full = list(self._served) if manner.both else None

    def layer(
        self,
        number: int,
        groups: Sequence[Group],
        choose: Round,
        activation: Activation,
        cache: Observed | None = None,
    ) -> None:
        """Round the groups of a decoder layer in the order of its computation, and go through it.

        choose: called once for each group. activation: what the served layer makes of its inputs.
        cache: that the served layer's keys and values go through.
        """
        load = partial(self._parts.layer, number)
        served, full = self._block(load, number, groups, choose, activation)
        served.advance(cache)
        if full is not None:
            full.advance()

    def tail(self, groups: Sequence[Group], choose: Round, activation: Activation) -> None:
        """The same for what follows the layers, such as the output head."""
        self._block(self._parts.tail, None, groups, choose, activation)

    def _block(
        self,
        load: Callable[[], Block],
        number: int | None,
        groups: Sequence[Group],
        choose: Round,
        activation: Activation,
    ) -> tuple["_Stream", "_Stream | None"]:
        names = [name for group in groups for name in group]

        def stream(hidden: list[Tensor], settled: bool) -> _Stream:
            block = load()
            found = matrices(self._spec, names, number, block.module)
            limit = self._manner.remembered // (2 if self._manner.both else 1)
            one = _Stream(block, hidden, found, _Recall(limit))
            if settled:
                one.settled.update(one.operand.values())
            return one

        served = stream(self._served, settled=False)
        full = None
        if self._full is not None:
            full = stream(self._full, settled=True)
            full.look_ahead()
        for step in _steps(groups, served):
            amax = self._amax(step, served) if self._manner.rounded else None
            if amax is not None:
                for group in step:
                    act = activation(group, amax)
                    served.activations.update({served.operand[name]: act for name in group})
            for chunk in self._chunks(step, served):
                self._round(chunk, served, full, choose, amax)
        return served, full

    def _chunks(self, step: list[Group], served: _Stream) -> Iterator[list[Group]]:
        """As many groups at a time as moments may be held of."""
        chunk: list[Group] = []
        held = 0
        for group in step:
            width = served.found[group[0]].values.shape[1]
            size = 4 * width * width * (6 if self._manner.both else 2)
            if chunk and held + size > self._manner.moments:
                yield chunk
                chunk, held = [], 0
            chunk.append(group)
            held += size
        yield chunk

    def _round(
        self,
        groups: list[Group],
        served: _Stream,
        full: _Stream | None,
        choose: Round,
        amax: float | None,
    ) -> None:
        """amax: what scales of inputs are made of, where that is known already."""
        operands = {served.operand[group[0]]: group for group in groups}
        found = self._moments(list(operands), served, full, whole=len(groups) > 1)
        for operand, group in operands.items():
            given = [served.found[name].values for name in group]
            seen = found[operand] if amax is None else replace(found[operand], amax=amax)
            for name, result in zip(group, choose(group, given, seen), strict=True):
                served.replace(name, result)

    def _amax(self, step: list[Group], served: _Stream) -> float:
        """The largest magnitude of the inputs of a group, or of all experts of a layer.

        Engines take the largest input scale of a layer's experts for every one of them: vLLM 0.32
        in fused_moe/oracle/nvfp4.py and in flashinfer_fp4_moe.py.
        """
        operands = [served.operand[group[0]] for group in step]
        found: Tensor | None = None
        for batch in range(len(served.hidden)):
            for x in served.inputs(batch, operands, whole=len(step) > 1).values():
                found = larger(found, x)
        return 0.0 if found is None else found.item()

    def _moments(
        self, operands: list[str], served: _Stream, full: _Stream | None, whole: bool
    ) -> dict[str, Seen]:
        """Of the text to choose by, and of the text held out."""
        # The two models give experts different tokens, whose products would mean nothing. Experts
        # are compared on the tokens that the served model gives them.
        if full is not None and any(across_experts(name) != name for name in operands):
            full = None

        both = self._manner.both
        seen = {}
        for operand in operands:
            width, device = served.found[operand].values.shape[1], served.hidden[0].device
            seen[operand] = tuple(
                Moments.zeros(width, device, cross=both, square=both and self._manner.rounded)
                for _ in range(2)
            )
        found: dict[str, Tensor] = {}
        for batch in range(len(served.hidden)):
            theirs = full.inputs(batch, operands, whole=whole) if full else {}
            for operand, x in served.inputs(batch, operands, whole=whole).items():
                found[operand] = larger(found.get(operand), x)
                act = served.activations.get(operand)
                moments = seen[operand][0 if batch < self._fit else 1]
                moments.add(x if act is None else act(x), theirs.get(operand, x))
        amax = {operand: value.item() for operand, value in found.items()}
        return {
            operand: Seen(amax.get(operand, 0.0), fit, held_out)
            for operand, (fit, held_out) in seen.items()
        }


def _steps(groups: Sequence[Group], served: _Stream) -> list[list[Group]]:
    """Groups in the order of their computation, the experts of a layer together."""
    order = {name: place for place, name in enumerate(served.order())}
    kinds: dict[Group, list[Group]] = {}
    for group in groups:
        kinds.setdefault(tuple(across_experts(name) for name in group), []).append(group)

    def first(step: list[Group]) -> int:
        return min(order.get(served.operand[group[0]], len(order)) for group in step)

    return sorted(kinds.values(), key=first)
