"""Calibration text through the layers of a tiny model, against hooks in the whole one."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4cli.calibrate.layerwise import Group, Manner, Walk
from nvfp4cli.calibrate.moments import Seen
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.layouts.sources import open_source
from nvfp4cli.models import spec as specs
from nvfp4cli.runtime.cache import Observed
from nvfp4cli.runtime.model import load
from nvfp4cli.runtime.parts import Parts

TOKENS = torch.randint(0, 250, (6, 16), generator=torch.Generator().manual_seed(0))
BATCHES = list(TOKENS.split(2))
QKV = ("q_proj", "k_proj", "v_proj")


def walk(
    folder: Path, *, both: bool = True, static: bool = False, remembered: int = 1 << 30
) -> Walk:
    source = open_source(open_checkpoint(folder))
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: partial(source.read, name) for name in source.tensors}
    parts = Parts(config, tensors, dtype=torch.float32, device="cpu")
    manner = Manner(both=both, rounded=static, remembered=remembered, moments=1 << 30)
    return Walk(parts, specs.load(config["model_type"]), BATCHES, 1, manner)


def groups(layer: int) -> list[Group]:
    """In no order: the walk finds that of the computation."""
    start = f"model.layers.{layer}"
    return [
        (f"{start}.mlp.down_proj",),
        (f"{start}.mlp.gate_proj", f"{start}.mlp.up_proj"),
        (f"{start}.self_attn.o_proj",),
        tuple(f"{start}.self_attn.{name}" for name in QKV),
    ]


def as_it_is(group: Group, weights: list[Tensor], seen: Seen) -> list[Tensor]:
    return [weight.clone() for weight in weights]


def halved(group: Group, weights: list[Tensor], seen: Seen) -> list[Tensor]:
    """A rounding that changes what follows."""
    return [weight / 2 for weight in weights]


def never(group: Group, amax: float) -> Callable[[Tensor], Tensor]:
    raise AssertionError("activations are not rounded")


def through(one: Walk, choose, activation=never, layers: Sequence[int] = (0, 1)) -> list[Group]:
    """Names of the groups in the order in which they are chosen for."""
    order: list[Group] = []

    def noted(group: Group, weights: list[Tensor], seen: Seen) -> list[Tensor]:
        order.append(group)
        return choose(group, weights, seen)

    for layer in layers:
        one.layer(layer, groups(layer), noted, activation)
    return order


def inputs(
    folder: Path, change: Callable[[torch.nn.Module], None] | None = None
) -> dict[str, Tensor]:
    """What the linear modules of the whole model are given, [tokens, K]."""
    model = load(folder, dtype=torch.float32, device="cpu")
    if change is not None:
        change(model)
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.__setitem__(name, args[0].flatten(0, -2))
            )
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    return found


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


def test_moments_are_those_of_the_inputs(llama):
    seen: dict[str, Seen] = {}

    def choose(group: Group, weights: list[Tensor], one: Seen) -> list[Tensor]:
        seen[group[0]] = one
        return weights

    order = through(walk(llama), choose)
    assert [group[0].rpartition(".")[2] for group in order] == 2 * [
        "q_proj", "o_proj", "gate_proj", "down_proj",
    ]  # fmt: skip
    for name, x in inputs(llama).items():
        if name not in seen:
            continue
        one = seen[name]
        held_out = 2 * 16  # the last batch
        torch.testing.assert_close(one.fit.hessian, x[:-held_out].T @ x[:-held_out])
        torch.testing.assert_close(one.held_out.hessian, x[-held_out:].T @ x[-held_out:])
        torch.testing.assert_close(one.fit.cross, one.fit.hessian)
        assert one.amax == pytest.approx(x.abs().max().item(), rel=1e-6)
        assert (one.fit.tokens, one.held_out.tokens) == (len(x) - held_out, held_out)


def test_each_matrix_sees_what_rounding_has_made_of_those_before(llama):
    seen: dict[str, Seen] = {}

    def choose(group: Group, weights: list[Tensor], one: Seen) -> list[Tensor]:
        seen[group[0]] = one
        return halved(group, weights, one)

    through(walk(llama), choose)

    def half(model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.data /= 2

    served, full = inputs(llama, half), inputs(llama)
    for name, one in seen.items():
        x, xq = full[name], served[name]
        whole = one.fit + one.held_out
        torch.testing.assert_close(whole.hessian, xq.T @ xq, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(whole.cross, x.T @ xq, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_what_is_remembered_changes_nothing(llama, static):
    def activation(group: Group, amax: float) -> Callable[[Tensor], Tensor]:
        return lambda x: (x / amax * 8).round() * amax / 8

    found = []
    for remembered in (1 << 30, 20_000, 0):
        seen: list[Seen] = []

        def choose(group, weights, one, seen=seen):
            seen.append(one)
            return halved(group, weights, one)

        through(walk(llama, static=static, remembered=remembered), choose, activation)
        found.append(seen)
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            assert ours.amax == theirs.amax
            assert torch.equal(ours.fit.hessian, theirs.fit.hessian)
            assert torch.equal(ours.fit.cross, theirs.fit.cross)


def test_rounded_activations_are_what_the_hessian_is_of(llama):
    rounded: dict[Group, list[Tensor]] = {}

    def activation(group: Group, amax: float) -> Callable[[Tensor], Tensor]:
        def act(x: Tensor) -> Tensor:
            return torch.zeros_like(x) if "o_proj" in group[0] else x

        return act

    def choose(group: Group, weights: list[Tensor], one: Seen) -> list[Tensor]:
        rounded[group] = [one.fit.hessian, one.fit.square]
        return weights

    through(walk(llama, static=True), choose, activation, layers=[0])
    for group, (hessian, square) in rounded.items():
        assert bool(hessian.any()) != ("o_proj" in group[0])
        assert bool(square.any())


def test_keys_and_values_are_seen(llama):
    cache = Observed()
    one = walk(llama, both=False)
    one.layer(0, groups(0), as_it_is, never, cache)
    model = load(llama, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        kept = model(input_ids=TOKENS, use_cache=True).past_key_values
    keys, values = kept.layers[0].keys, kept.layers[0].values
    assert cache.keys_amax.item() == pytest.approx(keys.abs().max().item(), rel=1e-5)
    assert cache.values_amax.item() == pytest.approx(values.abs().max().item(), rel=1e-5)


def test_experts_are_told_apart_and_those_without_tokens_counted(tiny_model):
    folder = tiny_model("mixtral")
    config = json.loads((folder / "config.json").read_text())
    start = "model.layers.0.block_sparse_moe.experts"
    numbers = range(config["num_local_experts"])
    names = [(f"{start}.{e}.w2",) for e in numbers]
    gates = [(f"{start}.{e}.w1", f"{start}.{e}.w3") for e in numbers]
    seen: dict[str, Seen] = {}

    def choose(group: Group, weights: list[Tensor], one: Seen) -> list[Tensor]:
        seen[group[0]] = one
        return weights

    one = walk(folder)
    one.layer(0, [*names, *gates], choose, never)
    tokens = [seen[gate[0]].whole.tokens for gate in gates]
    assert tokens == [seen[name[0]].whole.tokens for name in names]
    assert sum(tokens) == TOKENS.numel() * config["num_experts_per_tok"]
    assert all(0 < one.amax < 1e6 for one in seen.values())
