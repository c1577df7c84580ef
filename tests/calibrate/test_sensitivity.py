"""What rounding costs, from a backward pass layer by layer, against the whole model."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nvfp4cli import kernels
from nvfp4cli.calibrate.sensitivity import Emulation, Unit, divergences, in_fp8, in_nvfp4
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.layouts.sources import open_source
from nvfp4cli.models import spec as specs
from nvfp4cli.runtime.model import load
from nvfp4cli.runtime.parts import Parts

TOKENS = torch.randint(0, 250, (6, 16), generator=torch.Generator().manual_seed(0))
SEED = 5


def measured(
    folder: Path,
    units: dict[int | None, list[Unit]],
    formats: dict[str, Emulation],
    tokens: Tensor = TOKENS,
) -> dict[Unit, dict[str, float]]:
    source = open_source(open_checkpoint(folder))
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: partial(source.read, name) for name in source.tensors}
    parts = Parts(config, tensors, dtype=torch.float32, device="cpu")
    spec = specs.load(config["model_type"])
    running = divergences(parts, spec, tokens.split(2), units, formats, SEED)
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value


def units(layer: int) -> list[Unit]:
    start = f"model.layers.{layer}"
    qkv = tuple(f"{start}.self_attn.{name}_proj" for name in "qkv")
    return [
        (qkv,),
        ((f"{start}.self_attn.o_proj",),),
        ((f"{start}.mlp.gate_proj", f"{start}.mlp.up_proj"),),
        ((f"{start}.mlp.down_proj",),),
    ]


def scaled(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight * 1.001 for weight in weights]


def whole(folder: Path) -> torch.nn.Module:
    return load(folder, dtype=torch.float32, device="cpu")


def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits.flatten(0, -2)


def kl(expected: Tensor, found: Tensor) -> float:
    logs = (one.to(torch.float64).log_softmax(-1) for one in (found, expected))
    return functional.kl_div(*logs, reduction="sum", log_target=True).item() / len(expected)


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


def test_gradients_are_those_of_the_whole_model(llama):
    """The same sum, by autograd through all layers at once."""
    found = measured(llama, {0: units(0), 1: units(1)}, {"scaled": Emulation(scaled, None)})
    model = whole(llama)
    states: dict[int, Tensor] = {}

    def keep(number: int, _module, _args, output):
        states[number] = output if isinstance(output, Tensor) else output[0]

    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(partial(keep, number))
    model.model.embed_tokens.register_forward_hook(lambda *given: given[2].requires_grad_())
    generator = torch.Generator().manual_seed(SEED)
    expected = dict.fromkeys(found, 0.0)
    for batch in TOKENS.split(2):
        predicted = logits(model, batch)
        drawn = torch.multinomial(predicted.detach().softmax(-1), 1, generator=generator)[:, 0]
        before = dict(states)
        loss = functional.cross_entropy(predicted, drawn, reduction="sum")
        gradients = torch.autograd.grad(loss, [before[0], before[1]])
        for number, gradient in enumerate(gradients):
            for unit in units(number):
                modules = [model.get_submodule(name) for name in unit[0]]
                for module in modules:
                    module.weight.data *= 1.001
                logits(model, batch)
                for module in modules:
                    module.weight.data /= 1.001
                change = (states[number] - before[number]).detach()
                expected[unit] += (gradient * change).sum(-1).square().sum().item()
    for unit, total in expected.items():
        assert found[unit]["scaled"] == pytest.approx(total / 2 / TOKENS.numel(), rel=0.01)


def test_it_estimates_the_divergence(llama):
    """Of the last weights every token's change stands alone, so that only the draw is an estimate:
    4096 squares of near normal deviates, sqrt(2 / 4096) or some 2 %."""
    (down,) = units(1)[3:]
    formats = {"nvfp4": in_nvfp4("rtn", inputs=False)}
    tokens = torch.randint(0, 250, (64, 64), generator=torch.Generator().manual_seed(1))
    estimate = measured(llama, {1: [down]}, formats, tokens)[down]["nvfp4"]
    model = whole(llama)
    expected = logits(model, tokens)
    weight = model.get_submodule(down[0][0]).weight
    scale = GlobalScale.from_amax(kernels.amax(weight.data))
    weight.data = kernels.dequantize(kernels.quantize(weight.data, scale), torch.float32)
    divergence = kl(expected, logits(model, tokens))
    assert estimate == pytest.approx(divergence, rel=0.1)


@pytest.mark.parametrize("inputs", [False, True])
def test_eight_bits_cost_less_than_four(llama, inputs):
    formats = {
        "nvfp4": in_nvfp4("rtn", inputs=inputs),
        "fp8": in_fp8(inputs=inputs),
        "none": Emulation(lambda weights: [one.clone() for one in weights], None),
    }
    found = measured(llama, {0: units(0), 1: units(1)}, formats)
    assert list(found) == [*units(1), *units(0)]
    for costs in found.values():
        assert costs["none"] == 0 < costs["fp8"] < costs["nvfp4"] / 4


def test_rounded_inputs_count(llama):
    weights, both = (
        measured(llama, {0: units(0)}, {"nvfp4": in_nvfp4("rtn", inputs=inputs)})
        for inputs in (False, True)
    )
    more = [both[unit]["nvfp4"] > weights[unit]["nvfp4"] for unit in units(0)]
    assert sum(more) >= 3  # a draw of 96 tokens; errors may cancel in one


def test_behind_the_layers_it_is_the_divergence_itself(llama):
    head: Unit = (("lm_head",),)
    found = measured(llama, {None: [head]}, {"scaled": Emulation(scaled, None)})
    model = whole(llama)
    expected = logits(model, TOKENS)
    assert found[head]["scaled"] == pytest.approx(kl(expected, expected * 1.001), rel=0.05)


def test_experts_of_a_layer_are_one_unit(tiny_model):
    folder = tiny_model("mixtral")
    count = json.loads((folder / "config.json").read_text())["num_local_experts"]
    start = "model.layers.0.block_sparse_moe.experts"
    gates = [(f"{start}.{e}.w1", f"{start}.{e}.w3") for e in range(count)]
    downs = [(f"{start}.{e}.w2",) for e in range(count)]
    formats = {"nvfp4": in_nvfp4("mse", inputs=True), "fp8": in_fp8(inputs=True)}
    together: Unit = (*gates, *downs)
    found = measured(folder, {0: [together, (gates[0],)]}, formats)
    assert found[together]["nvfp4"] > found[together]["fp8"] > 0
    assert found[together]["nvfp4"] > found[gates[0],]["nvfp4"]
