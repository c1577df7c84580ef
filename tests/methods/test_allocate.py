"""Allocations under a budget of bits, against all that there are."""

import itertools
import math
import random

import pytest

from nvfp4cli.methods.allocate import Choice, Group, allocate

FORMATS = ("nvfp4", "fp8", "bf16")


def draw(rng: random.Random, groups: int, *, like_a_model: bool = False) -> list[Group]:
    """like_a_model: few sizes, and costs that fall with them; else nothing in order."""
    found = []
    for number in range(groups):
        parameters = 16 * (rng.choice((9, 12, 48)) if like_a_model else rng.randint(1, 40))
        if like_a_model:
            damage = rng.lognormvariate(0, 1)
            bits, costs = (4.5, 8, 16), (damage, damage * rng.uniform(0.01, 0.1), 0.0)
        else:
            bits = tuple(rng.choice((4, 4.5, 6, 8, 16)) for _ in range(rng.randint(1, 4)))
            costs = tuple(rng.choice((0, 1, 1, 2, rng.uniform(-1, 3))) for _ in bits)
        choices = tuple(
            Choice(f"{place}", int(each * parameters), float(cost))
            for place, (each, cost) in enumerate(zip(bits, costs, strict=True))
        )
        found.append(Group(f"g{number}", parameters, choices))
    return found


def total(chosen: dict[str, Choice]) -> float:
    return math.fsum(one.cost for one in chosen.values())


def size(chosen: dict[str, Choice]) -> int:
    return sum(one.size for one in chosen.values())


def parameters(groups: list[Group]) -> int:
    return sum(group.parameters for group in groups)


def best_of_all(groups: list[Group], budget: int) -> float | None:
    costs = [
        math.fsum(one.cost for one in chosen)
        for chosen in itertools.product(*(group.choices for group in groups))
        if sum(one.size for one in chosen) <= budget
    ]
    return min(costs, default=None)


@pytest.mark.parametrize("like_a_model", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_none_is_better(seed, like_a_model):
    rng = random.Random(seed)
    groups = draw(rng, rng.randint(1, 7), like_a_model=like_a_model)
    bits = rng.uniform(4, 10)
    budget = math.floor(bits * parameters(groups))
    expected = best_of_all(groups, budget)
    if expected is None:
        with pytest.raises(ValueError, match="the least is"):
            allocate(groups, bits)
        return
    chosen = allocate(groups, bits)
    assert list(chosen) == [group.name for group in groups]
    assert all(chosen[group.name] in group.choices for group in groups)
    assert size(chosen) <= budget
    assert total(chosen) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_none_of_many_is_better(seed):
    """Of twenty groups, by a table of the least cost for every size."""
    groups = draw(random.Random(seed), 20, like_a_model=True)
    budget = math.floor((5 + seed) * parameters(groups)) // 8  # sizes are whole bytes
    table = [0.0] * (budget + 1)
    for group in groups:
        table = [
            min(
                (table[room - one.size // 8] + one.cost for one in group.choices
                 if one.size // 8 <= room),
                default=math.inf,
            )
            for room in range(budget + 1)
        ]  # fmt: skip
    chosen = allocate(groups, 5 + seed)
    assert total(chosen) == pytest.approx(table[budget], rel=1e-12)


def test_more_bits_never_cost_more():
    groups = draw(random.Random(1), 120, like_a_model=True)
    costs = [total(allocate(groups, 4.5 + step / 8)) for step in range(93)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == pytest.approx(sum(group.choices[0].cost for group in groups))
    assert costs[-1] == 0  # 16 bits


def test_the_least_budget_is_named_and_enough():
    groups = [Group("a", 32, (Choice("nvfp4", 144, 1.0), Choice("fp8", 256, 0.0)))]
    with pytest.raises(ValueError, match=r"4\.4 bits are too few: the least is 4\.5"):
        allocate(groups, 4.4)
    assert allocate(groups, 4.5)["a"].format == "nvfp4"
    assert allocate(groups, 8)["a"].format == "fp8"


def test_ties_go_to_the_smaller_and_then_to_the_earlier():
    alike = (Choice("large", 300, 1.0), Choice("first", 200, 1.0), Choice("second", 200, 1.0))
    groups = [Group(name, 10, alike) for name in ("a", "b")]
    chosen = allocate(groups, 100)
    assert [one.format for one in chosen.values()] == ["first", "first"]
    spare = (Choice("nvfp4", 45, 1.0), Choice("fp8", 80, 0.0))
    twins = [Group(name, 10, spare) for name in ("a", "b")]
    assert allocate(twins, 6.25) == allocate(twins, 6.25)  # one of the two gets FP8
    assert size(allocate(twins, 6.25)) == 125


def test_sizes_need_have_no_common_divisor():
    """Odd sizes, as the scales of rows make them, and groups that save alike by the bit."""
    rng = random.Random(2)
    groups = []
    for number in range(600):
        count = rng.randint(10**6, 10**7)
        damage = count * rng.uniform(0.9, 1.1)
        sizes = (4 * count + 1, 8 * count + rng.randint(1, 99), 16 * count)
        costs = (damage, damage * 0.05, 0.0)
        choices = map(Choice, FORMATS, sizes, costs)
        groups.append(Group(f"g{number}", count, tuple(choices)))
    chosen = allocate(groups, 5.5)
    budget = math.floor(5.5 * parameters(groups))
    assert size(chosen) <= budget
    # The linear program: FP8 where it saves most by the bit, the last of them in part. bf16 saves a
    # fortieth of that.
    spare = budget - sum(group.choices[0].size for group in groups)
    bound = sum(group.choices[0].cost for group in groups)
    for saved, more in sorted((steps(group) for group in groups), key=lambda s: -s[0] / s[1]):
        part = min(1.0, spare / more)
        bound, spare = bound - part * saved, spare - part * more
    assert bound * (1 - 1e-12) <= total(chosen) < bound * (1 + 1e-4)


def steps(group: Group) -> tuple[float, int]:
    """What FP8 saves, and its bits."""
    four, eight, _ = group.choices
    return four.cost - eight.cost, eight.size - four.size


@pytest.mark.parametrize("choices", [(), (Choice("nvfp4", 9, math.nan),)])
def test_a_group_has_choices_with_finite_costs(choices):
    with pytest.raises(ValueError, match="g needs a choice"):
        allocate([Group("g", 2, choices)], 8)
