"""Which format each group of weights gets, so that a budget of bits costs the model least.

The multiple-choice knapsack problem, solved exactly: dynamic programming over the states that no
other beats in both size and cost, less those that Lagrange's relaxation shows to end above a
solution already known (Pisinger, "A minimal algorithm for the multiple-choice knapsack problem",
1995, is the same with a core that grows).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = 1e-9  # of the known cost: sums in another order are not told apart


@dataclass(frozen=True)
class Choice:
    """A format for a group. size: bits of all its tensors, scales too. cost: any finite number."""

    format: str
    size: int
    cost: float


@dataclass(frozen=True)
class Group:
    """Weights that share a format, such as those that engines fuse, or all experts of a layer.

    parameters: how many values they hold.
    """

    name: str
    parameters: int
    choices: tuple[Choice, ...]


def allocate(groups: Sequence[Group], bits: float) -> dict[str, Choice]:
    """The choices of the least total cost that need at most `bits` for each parameter on average.

    Of allocations that cost the same the smaller is taken, then the earlier choices. 600 groups of
    three choices take well under a second; experts of a layer belong in one group, since engines
    run them in one product, which leaves a few hundred groups of any model.

    Raises ValueError, with the least average that there is, where no allocation is small enough,
    and for a group without choices or a cost that is not finite.
    """
    for group in groups:
        if not group.choices or not all(math.isfinite(one.cost) for one in group.choices):
            raise ValueError(f"{group.name} needs a choice, and each of them a finite cost")
    parameters = sum(group.parameters for group in groups)
    budget = math.floor(bits * parameters)
    least = sum(min(one.size for one in group.choices) for group in groups)
    if least > budget:
        raise ValueError(f"{bits} bits are too few: the least is {least / parameters:.4g}")
    known, price = _greedy(groups, budget)
    chosen = _Search(groups, budget, known, price).best()
    return {group.name: one for group, one in zip(groups, chosen, strict=True)}


def _greedy(groups: Sequence[Group], budget: int) -> tuple[float, float]:
    """The cost of a good allocation, and the price of a bit: what the first that is lacking saves.

    From the smallest choices, the steps along each group's convex hull in the order of what a bit
    of them saves. The price makes the relaxation equal to the linear program.
    """
    size, cost, price = 0, 0.0, 0.0
    steps: list[tuple[float, int, int, float]] = []  # saved by a bit, group, bits, saved
    for number, group in enumerate(groups):
        first, *rest = _hull(group.choices)
        size, cost = size + first.size, cost + first.cost
        for before, after in zip([first, *rest], rest, strict=False):
            more, saved = after.size - before.size, before.cost - after.cost
            steps.append((saved / more, number, more, saved))
    stopped: set[int] = set()
    for rate, number, more, saved in sorted(steps, key=lambda step: (-step[0], step[1])):
        if number in stopped or size + more > budget:
            price = price or rate
            stopped.add(number)  # its later steps start from this one
            continue
        size, cost = size + more, cost - saved
    return cost, price


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull by size: each step costs bits and saves, at a falling rate."""
    hull: list[Choice] = []
    for one in sorted(choices, key=lambda one: (one.size, one.cost)):
        if hull and one.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) <= _rate(hull[-1], one):
            hull.pop()
        hull.append(one)
    return hull


def _rate(before: Choice, after: Choice) -> float:
    return (before.cost - after.cost) / (after.size - before.size)


class _Search:
    """known: the cost of an allocation that fits. price: Lagrange's multiplier, of a bit, >= 0."""

    def __init__(self, groups: Sequence[Group], budget: int, known: float, price: float) -> None:
        self._budget, self._price = budget, price
        largest = sum(max(abs(one.cost) for one in group.choices) for group in groups)
        self._limit = known + _ROUNDING * largest
        # What any allocation costs at least, and by how much a single choice may raise that.
        bound = sum(self._priced(group.choices)[0] for group in groups) - price * budget
        self._open = [self._within(group.choices, self._limit - bound) for group in groups]

    def best(self) -> list[Choice]:
        """A choice for each group, in their order."""
        # Groups whose other choices are far worse come first: they hardly multiply the states.
        order = sorted(range(len(self._open)), key=lambda i: -self._regret(self._open[i]))
        settled = [i for i in order if len(self._open[i]) == 1]
        chosen = {i: self._open[i][0] for i in settled}
        branching = order[len(settled) :]
        picks = self._branch(
            [self._open[i] for i in branching],
            sum(one.size for one in chosen.values()),
            sum(one.cost for one in chosen.values()),
        )
        chosen |= dict(zip(branching, picks, strict=True))
        return [chosen[i] for i in range(len(self._open))]

    def _branch(self, groups: list[list[Choice]], size: int, cost: float) -> list[Choice]:
        """Of groups with several choices; size, cost: of all others."""
        sizes = torch.tensor([size])
        costs = torch.tensor([cost], dtype=torch.float64)
        # Of the groups to come: the least size, and the least cost with each bit paid for.
        left = sum(min(one.size for one in group) for group in groups)
        bound = sum(self._priced(group)[0] for group in groups)
        trail: list[tuple[Tensor, list[Choice]]] = []
        for group in groups:
            left -= min(one.size for one in group)
            bound -= self._priced(group)[0]
            more = torch.tensor([one.size for one in group])
            spent = torch.tensor([one.cost for one in group], dtype=torch.float64)
            sizes = (sizes[:, None] + more).flatten()  # [states * choices]
            costs = (costs[:, None] + spent).flatten()
            over = (sizes - self._budget).to(torch.float64)
            hopeful = (over + left <= 0) & (costs + bound + self._price * over <= self._limit)
            kept = hopeful.nonzero()[:, 0]
            kept = kept[_undominated(sizes[kept], costs[kept])]
            sizes, costs = sizes[kept], costs[kept]
            trail.append((kept, group))
        chosen, state = [], int(costs.argmin())
        for kept, group in reversed(trail):
            state, pick = divmod(int(kept[state]), len(group))
            chosen.append(group[pick])
        return chosen[::-1]

    def _priced(self, choices: Sequence[Choice]) -> list[float]:
        """Costs with bits paid for, the least first."""
        return sorted(one.cost + self._price * one.size for one in choices)

    def _within(self, choices: Sequence[Choice], slack: float) -> list[Choice]:
        """Choices that an allocation as good as the known one can have."""
        limit = self._priced(choices)[0] + slack
        return [one for one in choices if one.cost + self._price * one.size <= limit]

    def _regret(self, choices: list[Choice]) -> float:
        """How much worse the second choice is."""
        first, second = [*self._priced(choices), math.inf][:2]
        return second - first


def _undominated(sizes: Tensor, costs: Tensor) -> Tensor:
    """Places of states that cost less than every other as small, by size; int64."""
    order = costs.argsort(stable=True)
    order = order[sizes[order].argsort(stable=True)]
    sorted_costs = costs[order]
    before = torch.cat([sorted_costs.new_full((1,), math.inf), sorted_costs.cummin(0).values[:-1]])
    return order[sorted_costs < before]
