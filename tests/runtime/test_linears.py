"""What linear layers are given is seen, whatever module computes with their weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.models import spec as specs
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.recipe import Recipe
from nvfp4cli.runtime.linears import ATTENTION, Linears, Site
from nvfp4cli.runtime.matrices import Matrix, of_model, placed
from nvfp4cli.runtime.model import load

TYPES = ["llama", "gpt2", "mixtral", "gpt_oss", "llama4_text", "granitemoe", "qwen3_moe", "phi3",
         "deepseek_v3"]  # fmt: skip
TOKENS = torch.randint(0, 250, (4, 64), generator=torch.Generator().manual_seed(0))


def model_of(folder: Path) -> tuple[nn.Module, dict[str, Matrix]]:
    """A model and its matrices under the names that they are written as."""
    checkpoint = open_checkpoint(folder)
    plan = plan_quantize(
        checkpoint, Recipe(layout="modelopt"), model="m", arch_spec=None, strict=False
    )
    names = [member.module for member in plan.members if member.action == "quantize"]
    model = load(folder, dtype=torch.float32, device="cpu")
    # What `Parts` asks for too: other implementations multiply by all experts at once.
    model.config._experts_implementation = "eager"
    spec = specs.load(checkpoint.config["model_type"])
    return model, of_model(spec, names, model)


def sites(found: dict[str, Matrix]) -> list[Site]:
    return [Site(name, one.operand) for name, one in found.items()]


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_every_product_is_seen_with_its_input(
    tiny_model: Callable[..., Path], model_type: str
) -> None:
    model, found = model_of(tiny_model(model_type))
    seen: dict[int, Tensor] = {}

    def see(site: Site, x: Tensor) -> None:
        assert x.shape[1] in site.weight.shape
        seen[site.weight.data_ptr()] = x

    given: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            place = module.weight.data_ptr()
            module.register_forward_pre_hook(
                lambda _, args, place=place: given.__setitem__(place, args[0])
            )
    expected = model(input_ids=TOKENS, use_cache=False).logits
    with Linears(sites(found), see):
        assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, expected)
    assert {one.operand.data_ptr() for one in found.values()} == seen.keys()
    modules = given.keys() & seen.keys()
    assert modules
    for place in modules:
        assert torch.equal(seen[place], given[place].reshape(-1, given[place].shape[-1]))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_oss", "llama4_text"])
@torch.no_grad()
def test_an_input_can_be_exchanged(tiny_model: Callable[..., Path], model_type: str) -> None:
    """Zeros for inputs are zeros for weights."""
    model, found = model_of(tiny_model(model_type))
    name = next(name for name in found if name.endswith(("down_proj", "mlp.c_proj")))
    chosen = {name: found[name]}
    expected = model(input_ids=TOKENS, use_cache=False).logits
    with Linears(sites(chosen), lambda _, x: torch.zeros_like(x)):
        without = model(input_ids=TOKENS, use_cache=False).logits
    assert not torch.equal(without, expected)
    found[name].operand.zero_()
    assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, without)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "gpt_oss", "llama4_text"])
@torch.no_grad()
def test_a_branch_reads_what_was_not_exchanged(
    tiny_model: Callable[..., Path], model_type: str
) -> None:
    """Branches of half of each weight, beside zeros for inputs, are halved weights."""
    model, found = model_of(tiny_model(model_type))
    together: dict[int, list[Matrix]] = {}
    for one in found.values():
        together.setdefault(one.operand.data_ptr(), []).append(one)
    branched = [
        Site(own[0].name, own[0].operand, placed((one, one.values / 2) for one in own))
        for own in together.values()
    ]
    with Linears(branched, lambda _, x: torch.zeros_like(x)):
        beside = model(input_ids=TOKENS, use_cache=False).logits
    for own in together.values():
        own[0].operand.div_(2)
    halved = model(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(beside, halved, rtol=0, atol=1e-5 * halved.abs().max().item())


class Memory(dict[tuple[str, int], Tensor]):
    def get(self, name: str, call: int) -> Tensor | None:
        return super().get((name, call))

    def put(self, name: str, call: int, product: Tensor) -> None:
        self[name, call] = product


@torch.no_grad()
def test_products_and_attention_are_remembered(tiny_model: Callable[..., Path]) -> None:
    model, found = model_of(tiny_model("llama"))
    memory = Memory()

    def run() -> Tensor:
        with Linears(sites(found), lambda *_: None, memory):
            return model(input_ids=TOKENS, use_cache=False).logits

    first = run()
    assert (ATTENTION, 1) in memory
    for one in found.values():
        one.operand.fill_(torch.nan)  # which nothing multiplies by any more
    assert torch.equal(run(), first)
