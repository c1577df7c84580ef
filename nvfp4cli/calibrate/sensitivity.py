"""What it costs a model that some of its weights are rounded: KL divergence, in nats for a token.

For small changes d of a layer's outputs the divergence from the unquantised model is half of
E[(g . d)^2], g being the gradient of the loss at these outputs for tokens that the model itself
would draw (the Fisher information; the text's own tokens do not give it, see Kunstner et al.,
arXiv:1905.12558). One backward pass through the unquantised model gives all g; running a layer once
more with the weights in question rounded gives d.

On the 120 groups of SmolLM2-135M in W4A4, 1024 tokens rank them as the divergence that each causes
alone does (Spearman 0.97, each within some 20 % of it), and the sum foretells that of all, 0.38 for
0.44. With the text's own tokens the rank correlation is 0.89, with the relative error of a group's
own output -0.46.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4cli import kernels
from nvfp4cli.calibrate.layerwise import Group
from nvfp4cli.formats import fp8
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.methods import scales
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.runtime import activations
from nvfp4cli.runtime.linears import Linears, Site
from nvfp4cli.runtime.matrices import Matrix, matrices
from nvfp4cli.runtime.parts import Block, Parts

Unit = tuple[Group, ...]  # groups that get one format, such as those of all experts of a layer
Act = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Emulation:
    """What a format makes of a layer.

    weights: of the matrices of a group, fp32 [out, in], as they are served. inputs: of the largest
    magnitude of inputs, the rounding of an input [tokens, in]; None: inputs stay as they are.
    """

    weights: Callable[[Sequence[Tensor]], list[Tensor]]
    inputs: Callable[[float], Act] | None


def in_nvfp4(method: str, *, inputs: bool) -> Emulation:
    """method: of `scales.quantize`. inputs: whether they are NVFP4 too, under a static scale."""

    def weights(group: Sequence[Tensor]) -> list[Tensor]:
        scale = scales.global_scale(max(kernels.amax(one) for one in group), method)
        quantized = [scales.quantize(one, scale, method) for one in group]
        return [kernels.dequantize(one, torch.float32) for one in quantized]

    def act(amax: float) -> Act:
        return activations.static(GlobalScale.from_amax(amax))

    return Emulation(weights, act if inputs else None)


def in_fp8(*, inputs: bool) -> Emulation:
    """E4M3 under one static scale for a group, and one for its inputs where these are rounded."""

    def weights(group: Sequence[Tensor]) -> list[Tensor]:
        scale = fp8.scale_of(max(kernels.amax(one) for one in group))
        return [fp8.rounded(one, scale) for one in group]

    def act(amax: float) -> Act:
        return activations.static_fp8(fp8.scale_of(amax))

    return Emulation(weights, act if inputs else None)


def divergences(
    parts: Parts,
    spec: ArchSpec,
    batches: Sequence[Tensor],
    units: Mapping[int | None, Sequence[Unit]],
    formats: Mapping[str, Emulation],
    seed: int = 0,
) -> Generator[int, None, dict[Unit, dict[str, float]]]:
    """The divergence that each unit alone causes in each format: estimates, and not negative.

    Yields the numbers of the layers as they are done, the last one first.

    batches: int64 tokens [B, T]. units: by the number of the decoder layer; None: of what follows
    the layers, where the divergence itself is computed. seed: of the tokens that are drawn.

    Each part of the model is read twice and is alone in memory. The host holds the hidden states
    between all layers, 4 bytes x tokens x layers x hidden size; the device those around one layer,
    what autograd keeps of one batch there, and the logits of one batch five times.
    """
    states, last = _forward(parts, batches)
    tokens = sum(batch.numel() for batch in batches)
    tail = _Part(parts.tail(), spec, None, units.get(None, ()))
    gradients = _gradients(tail, last, seed)
    found = _after_layers(tail, last, units.get(None, ()), formats)
    for number in reversed(range(len(parts))):
        part = _Part(parts.layer(number), spec, number, units.get(number, ()))
        given = [one.to(last[0].device) for one in states.pop()]
        made, before = [], []
        for x, g in zip(given, gradients, strict=True):
            leaf = x.detach().requires_grad_()
            y = part.watched(leaf)
            made.append(y.detach())
            before.append(torch.autograd.grad(y, leaf, g)[0])
        for unit in units.get(number, ()):
            found[unit] = dict.fromkeys(formats, 0.0)
            for name, emulation in formats.items():
                with part.rounded(unit, emulation) as run:
                    for x, y, g in zip(given, made, gradients, strict=True):
                        along = ((run(x) - y) * g).sum(dim=-1)  # [B, T]: of each token
                        found[unit][name] += along.square().sum(dtype=torch.float64).item() / 2
        gradients = before
        yield number
    return {
        unit: {name: total / tokens for name, total in totals.items()}
        for unit, totals in found.items()
    }


@torch.no_grad()
def _forward(parts: Parts, batches: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """What each layer is given, of each batch, in host memory; and what the last one makes."""
    states, current = [], parts.enter(batches)
    for number in range(len(parts)):
        states.append([one.cpu() for one in current])
        block = parts.layer(number)
        current = [block(one) for one in current]
    return states, current


def _gradients(tail: "_Part", last: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Of the loss of tokens drawn from the model itself, at what the tail is given: [B, T, H]."""
    generator = torch.Generator(last[0].device).manual_seed(seed)
    found = []
    for hidden in last:
        x = hidden.detach().requires_grad_()
        logits = tail.watched(x).flatten(0, -2).to(torch.float32)
        drawn = torch.multinomial(logits.detach().softmax(dim=-1), 1, generator=generator)[:, 0]
        loss = functional.cross_entropy(logits, drawn, reduction="sum")
        found.append(torch.autograd.grad(loss, x)[0])
    return found


@torch.no_grad()
def _after_layers(
    tail: "_Part",
    last: Sequence[Tensor],
    units: Sequence[Unit],
    formats: Mapping[str, Emulation],
) -> dict[Unit, dict[str, float]]:
    """Sums over all tokens."""
    found = {unit: dict.fromkeys(formats, 0.0) for unit in units}
    for hidden in last if units else ():
        expected = tail.block(hidden).to(torch.float32).log_softmax(dim=-1)
        for unit in units:
            for name, emulation in formats.items():
                with tail.rounded(unit, emulation) as run:
                    logs = run(hidden).to(torch.float32).log_softmax(dim=-1)
                divergence = functional.kl_div(logs, expected, reduction="sum", log_target=True)
                found[unit][name] += divergence.item()
    return found


class _Part:
    """A part of a model, of which some weights may be rounded for a while."""

    def __init__(
        self, block: Block, spec: ArchSpec, number: int | None, units: Sequence[Unit]
    ) -> None:
        self.block = block
        names = [name for unit in units for group in unit for name in group]
        self._found = matrices(spec, names, number, block.module)
        self._largest: dict[int, float] = {}  # magnitudes of inputs, by the operand's memory

    def watched(self, hidden: Tensor) -> Tensor:
        """What the part makes of hidden states; the largest inputs of its matrices are noted."""

        def see(site: Site, x: Tensor) -> None:
            place = site.weight.data_ptr()
            found = x.detach().abs().amax().item()
            self._largest[place] = max(found, self._largest.get(place, 0.0))

        with Linears(_sites(self._found.values()), see):
            return self.block(hidden)

    @contextmanager
    def rounded(self, unit: Unit, emulation: Emulation) -> Iterator[Callable[[Tensor], Tensor]]:
        """The part while the matrices of a unit are as a format serves them."""
        acts: dict[int, Act] = {}
        kept: list[tuple[Tensor, Tensor]] = []
        for group in unit:
            members = [self._found[name] for name in group]
            given = [one.values for one in members]
            kept += [(values, values.clone()) for values in given]
            for values, served in zip(given, emulation.weights(given), strict=True):
                values.copy_(served)
            # No token of the text has reached an operand that is not among these.
            places = {one.operand.data_ptr() for one in members} & self._largest.keys()
            if emulation.inputs and places:
                act = emulation.inputs(max(self._largest[place] for place in places))
                acts |= dict.fromkeys(places, act)
        sites = _sites(self._found[name] for group in unit for name in group)

        def change(site: Site, x: Tensor) -> Tensor | None:
            act = acts.get(site.weight.data_ptr())
            return None if act is None else act(x)

        @torch.no_grad()
        def run(hidden: Tensor) -> Tensor:
            with Linears(sites, change):
                return self.block(hidden)

        try:
            yield run
        finally:
            for values, original in kept:
                values.copy_(original)


def _sites(found: Iterable[Matrix]) -> list[Site]:
    return [Site(one.name, one.operand) for one in found]
