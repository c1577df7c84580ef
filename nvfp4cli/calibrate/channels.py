"""Which channels of inputs to make smaller, and the columns that read them larger.

The factors that are tried for an input with the root mean squares x of its channels are x^a, as
SmoothQuant (arXiv 2211.10438) has them, and x^a / w^(1 - a), as AWQ (arXiv 2306.00978) has them, w
the mean magnitudes of the columns: the first make activations even, whose blocks share a step, the
second columns of the weight. Those that change the outputs least when weights and, in W4A4, inputs
are rounded are taken, ones among them.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.runtime import activations
from nvfp4cli.runtime.linears import Linears, Site
from nvfp4cli.runtime.matrices import matrices
from nvfp4cli.runtime.parts import Parts

_SMOOTH = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
_WEIGHED = (0.25, 0.5, 0.75)
_ROWS = 1024  # of inputs, that outputs are compared on
_MATRICES = 8  # that stand for all readers of an input, where experts are many
_SPREAD = 12  # powers of two between the middle of all factors and any of them


@dataclass(frozen=True)
class Readers:
    """An input that may be scaled.

    matrices: those that are quantised of the modules that read it. channels: of each channel what
    makes it, where several are made by one, which get one factor.
    """

    name: str
    matrices: tuple[str, ...]
    channels: tuple[int, ...] | None = None


@dataclass
class _Inputs:
    """Of the tokens that have passed. rows: every n-th of them, fp32 [tokens, K]."""

    every: int
    square: Tensor | None = None
    tokens: int = 0
    rows: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        x = x.to(torch.float32)
        total = x.square().sum(dim=0)
        self.square = total if self.square is None else self.square + total
        first = -self.tokens % self.every
        self.rows.append(x[first :: self.every])
        self.tokens += len(x)


def search(
    parts: Parts,
    spec: ArchSpec,
    batches: Sequence[Tensor],
    inputs: Mapping[int, Sequence[Readers]],
    *,
    static: bool,
) -> Generator[int, None, dict[str, Tensor]]:
    """The factors of each input, fp32 [K], powers of two; none where ones are best.

    Yields the numbers of the layers as they are done. batches: int64 tokens [B, T]. inputs: by the
    decoder layer. static: inputs are rounded to NVFP4 too.
    """
    found: dict[str, Tensor] = {}
    hidden = parts.enter(batches)
    every = max(1, sum(batch.numel() for batch in batches) // _ROWS)
    for number in range(len(parts)):
        block = parts.layer(number)
        own = {one.name: one for one in inputs.get(number, ())}
        names = {one: [*r.matrices[:_MATRICES]] for one, r in own.items()}
        placed = matrices(spec, [n for o in names.values() for n in o], number, block.module)
        seen = {name: _Inputs(every) for name in own}
        sites = [
            Site(one, placed[matrix].operand)
            for one, of_input in names.items()
            # Modules with one input see the same; experts see the tokens that are theirs.
            for matrix in (of_input if ".experts." in of_input[0] else of_input[:1])
        ]
        hidden = _passed(block, hidden, sites, seen)
        for name, readers in own.items():
            weights = [placed[matrix].values.to(torch.float32) for matrix in names[name]]
            factors = _best(weights, seen[name], readers.channels, static=static)
            if factors is not None:
                found[name] = factors.cpu()
        yield number
    return found


@torch.no_grad()
def _passed(
    block: Callable[[Tensor], Tensor],
    hidden: list[Tensor],
    sites: Sequence[Site],
    seen: Mapping[str, _Inputs],
) -> list[Tensor]:
    """What a layer makes of hidden states; its inputs are noted."""

    def see(site: Site, x: Tensor) -> None:
        seen[site.name].add(x)

    with Linears(sites, see):
        return [block(one) for one in hidden]


@torch.no_grad()
def _best(
    weights: list[Tensor],
    inputs: _Inputs,
    channels: tuple[int, ...] | None,
    *,
    static: bool,
) -> Tensor | None:
    """The factors with which outputs change least, None for ones. weights: fp32 [N, K] each."""
    if inputs.square is None or not bool(inputs.square.any()):
        return None
    x = torch.cat(inputs.rows)
    outputs = [x @ weight.T for weight in weights]
    best, least = None, _error(weights, x, outputs, static=static)
    size = torch.cat(weights).abs().mean(dim=0)
    for factors in _candidates(inputs.square.sqrt(), size, channels):
        scaled = [weight * factors for weight in weights]
        error = _error(scaled, x / factors, outputs, static=static)
        if error < least:
            best, least = factors, error
    return best


def _error(weights: list[Tensor], x: Tensor, outputs: list[Tensor], *, static: bool) -> float:
    """Sum of the squared errors of outputs with weights to nearest; x: [tokens, K]."""
    scale = GlobalScale.from_amax(max(kernels.amax(weight) for weight in weights))
    if static:
        x = activations.static(GlobalScale.from_amax(kernels.amax(x)))(x)
    total = x.new_zeros((), dtype=torch.float64)
    for weight, output in zip(weights, outputs, strict=True):
        rounded = kernels.dequantize(kernels.quantize(weight, scale), torch.float32)
        total += (x @ rounded.T - output).square().sum(dtype=torch.float64)
    return total.item()


def _candidates(x: Tensor, w: Tensor, channels: tuple[int, ...] | None) -> Iterator[Tensor]:
    """Factors to try, fp32 [K] each; units of x and w do not matter."""
    x, w = _positive(_shared(x.square(), channels).sqrt()), _positive(_shared(w, channels))
    for strength in _SMOOTH:
        yield _usable(x**strength)
    for strength in _WEIGHED:
        yield _usable(x**strength / w ** (1 - strength))


def _shared(values: Tensor, channels: tuple[int, ...] | None) -> Tensor:
    """The mean over channels that are made by one; [K]."""
    if channels is None:
        return values
    index = torch.tensor(channels, device=values.device)
    sums = values.new_zeros(int(index.max()) + 1).index_add_(0, index, values)
    counts = torch.zeros_like(sums).index_add_(0, index, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[index]


def _positive(values: Tensor) -> Tensor:
    """Channels that nothing reaches count as the least of the others."""
    return values.clamp(min=values[values > 0].min())


def _usable(factors: Tensor) -> Tensor:
    """Powers of two around one, the nearest by ratio."""
    exponents = factors.log2()
    return (exponents - exponents.mean()).clamp(-_SPREAD, _SPREAD).round().exp2()
