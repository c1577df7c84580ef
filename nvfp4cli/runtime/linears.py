"""See, and change, what the linear layers of a running model are given.

A product is recognised by the memory of its weight, whatever module computes it: linear layers,
Conv1D, and experts that are slices of one parameter (transformers' plain implementation of experts,
"eager", multiplies by one slice after the other, or by all in one batched product).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Site:
    """A weight that a model multiplies by: a parameter, or the slice of an expert.

    branch: the part of the weight, in the same form and with the same strides, that multiplies what
    the site is given and not what that is changed to; None: none of it.
    """

    name: str
    weight: Tensor
    branch: Tensor | None = None


class Recall(Protocol):
    """Products that have been computed before; `call` counts the calls of a name from 0."""

    def get(self, name: str, call: int) -> Tensor | None:
        """A product that need not be computed."""

    def put(self, name: str, call: int, product: Tensor) -> None:
        """Offer a product."""


# What a site is given, [tokens, K] -> what it is to be given instead; None: the same.
See = Callable[[Site, Tensor], Tensor | None]

# Where a function takes its input and its weight.
_PLACES: dict[Any, tuple[int, int]] = {
    functional.linear: (0, 1),
    torch.matmul: (0, 1),
    Tensor.matmul: (0, 1),
    Tensor.__matmul__: (0, 1),
    torch.mm: (0, 1),
    torch.addmm: (1, 2),
}
_BATCHED = (torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
ATTENTION = "scaled_dot_product_attention"  # the name that its outputs are remembered by


class Linears(TorchFunctionMode):
    """While this context is entered, `see` is called before every product with a site's weight.

    recall: where products, and the outputs of attention, are looked up and offered.
    """

    def __init__(self, sites: Iterable[Site], see: See, recall: Recall | None = None) -> None:
        super().__init__()
        self._sites = {site.weight.data_ptr(): site for site in sites}
        self._see, self._recall = see, recall
        self._calls: dict[str, int] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLACES and len(args) > _PLACES[func][1]:
            place, weight = _PLACES[func]
            if args[weight].ndim == 2 and (site := self._sites.get(args[weight].data_ptr())):
                return self._product(site, func, args, kwargs, place)
        if func in _BATCHED and args[1].ndim == 3 and args[1].data_ptr() in self._sites:
            given = torch.stack([self._given(*pair) for pair in zip(args[1], args[0], strict=True)])
            product = func(given, *args[1:], **kwargs)
            for lost, weight, own in zip(args[0] - given, args[1], product, strict=True):
                if (site := self._sites[weight.data_ptr()]).branch is not None:
                    own.add_(lost @ _like(weight, site.weight, site.branch))
            return product
        if func is functional.scaled_dot_product_attention:
            return self._remembered(ATTENTION, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)

    def _product(
        self, site: Site, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int
    ) -> Tensor:
        x = args[place]
        changed = self._see(site, x.reshape(-1, x.shape[-1]))
        given = x if changed is None else changed.view(x.shape)

        def compute() -> Tensor:
            product: Tensor = func(*args[:place], given, *args[place + 1 :], **kwargs)
            if site.branch is None or changed is None:
                return product
            branch = _like(args[_PLACES[func][1]], site.weight, site.branch)
            return product + (x - given) @ (branch.T if func is functional.linear else branch)

        return self._remembered(site.name, compute)

    def _given(self, weight: Tensor, x: Tensor) -> Tensor:
        """One expert of a batched product; x: [tokens, K]."""
        changed = self._see(self._sites[weight.data_ptr()], x)
        return x if changed is None else changed

    def _remembered(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        if self._recall is None:
            return compute()
        call = self._calls[name] = self._calls.get(name, -1) + 1
        product = self._recall.get(name, call)
        if product is None:
            product = compute()
            self._recall.put(name, call, product)
        return product


def _like(used: Tensor, weight: Tensor, branch: Tensor) -> Tensor:
    """The branch of a weight, transposed where the weight is used so."""
    return branch if used.stride() == weight.stride() else branch.T
