"""Jobs of decoder layers quantised by what calibration text shows, layer after layer."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.calibrate.layerwise import Group, Manner, Split, Walk
from nvfp4cli.calibrate.moments import Seen
from nvfp4cli.calibrate.statistics import Inputs, Statistics
from nvfp4cli.calibrate.text import Sequences
from nvfp4cli.errors import UnsupportedError, WeightError
from nvfp4cli.formats import fp8
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.layouts.record import CacheScales, Stored, StoredFp8
from nvfp4cli.pipeline import compute
from nvfp4cli.pipeline.compute import Result
from nvfp4cli.plan.record import Job, Member, Plan
from nvfp4cli.recipe import COMPENSATED
from nvfp4cli.rotate import fold
from nvfp4cli.runtime import activations
from nvfp4cli.runtime.cache import Observed
from nvfp4cli.runtime.parts import Parts, Tensors

# Tokens that go through a layer at a time, or one sequence.
BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
_HOST_BYTES = 6 << 30  # of a host's memory, used for speed and for the moments of experts
_HELD_OUT = 8  # of so many sequences one is held out


def facts_of(plan: Plan) -> dict[str, Any]:
    """What of a plan statistics hold for."""
    return {
        "model_type": plan.source.checkpoint.config.get("model_type"),
        "rotation": plan.facts.rotation,
    }


def memory_bytes(plan: Plan) -> int:
    """What calibration takes of a host's memory beside the plan's own, at most; an estimate.

    The layers, embeddings and hidden states of the models that go through the text side by side in
    fp32, their hidden states, and what is remembered and summed.
    """
    assert plan.spec is not None
    recipe, sizes = plan.recipe, plan.spec.sizes(plan.spec.language(plan.source.checkpoint.config))
    tokens, width = recipe.sequences * recipe.sequence_length, sizes["hidden_size"]
    models = 2 if recipe.method in COMPENSATED else 1
    parts: dict[str, int] = {}
    products: dict[str, int] = {}
    columns = 0
    for job in plan.jobs:
        for member in job.members:
            size = 4 * math.prod(member.shape)
            parts[job.stage] = parts.get(job.stage, 0) + size
            if member.quantized:
                rows, k = member.shape
                columns = max(columns, k)
                products[job.stage] = products.get(job.stage, 0) + 4 * tokens * (rows + k)
    remembered = min(_HOST_BYTES // 3, models * max(products.values(), default=0))
    # Sums, and what GPTQ makes of one: ordered, factored, inverted, in fp64 if need be.
    summed = 4 * columns * columns * (6 * models + 8)
    batch = 4 * max(BATCH_TOKENS["cpu"], recipe.sequence_length)
    passing = batch * (8 * width + 4 * columns)
    if recipe.measures:
        passing += 5 * 4 * recipe.sequence_length * sizes["vocab_size"]
    # A part is read in the source's dtype, folded and placed.
    largest = 2 * models * max(parts.values(), default=0)
    return largest + 4 * models * tokens * width + remembered + summed + passing


class Layers:
    """The quantised jobs of a plan, layer by layer in the order of a forward pass.

    statistics: fill up as layers are done.
    """

    def __init__(self, plan: Plan, text: Sequences, device: torch.device) -> None:
        assert plan.spec is not None
        self._plan = plan
        self.statistics = Statistics({**text.facts, **facts_of(plan)})
        config = json.loads(plan.files["config.json"])
        parts = Parts(config, folded(plan), dtype=torch.float32, device=str(device))
        fit, held_out = _batches(text.tokens, BATCH_TOKENS[device.type])
        recipe = plan.recipe
        memory = _memory(device)
        manner = Manner(
            both=recipe.method in COMPENSATED,
            rounded=recipe.scheme == "w4a4",
            remembered=memory // 3,
            moments=memory // 3,
        )
        self._layers = len(parts)
        self._walk = Walk(parts, plan.spec, [*fit, *held_out], len(held_out), manner)

    def work(self, stage: str, jobs: Sequence[Job]) -> dict[int, tuple[list[Result], list[str]]]:
        """Results and warnings of the jobs of a stage that need calibration, by their places."""
        try:
            with _tensor_cores():
                return self._work(stage, jobs)
        except torch.OutOfMemoryError:
            raise UnsupportedError(
                f"The GPU has too little free memory to calibrate {stage}: take fewer --sequences, "
                "or use --device cpu."
            ) from None

    def _work(self, stage: str, jobs: Sequence[Job]) -> dict[int, tuple[list[Result], list[str]]]:
        number = stage_number(stage)
        places = {
            tuple(member.module for member in job.members): place
            for place, job in enumerate(jobs)
            if job.members[0].quantized
        }
        caches = {
            place: job.members[0].module
            for place, job in enumerate(jobs)
            if job.members[0].action == "cache"
        }
        found: dict[int, tuple[list[Result], list[str]]] = {}

        def choose(group: Group, weights: list[Tensor], seen: Seen) -> list[Tensor | Split]:
            stored, warnings = self._quantized(jobs[places[group]], weights, seen)
            found[places[group]] = [on_host(one) for one in stored], warnings
            return [_served(one) for one in stored]

        def activation(group: Group, amax: float) -> Callable[[Tensor], Tensor]:
            """What the served layer makes of an input."""
            _check_finite(group[0], amax)
            if jobs[places[group]].members[0].action == "fp8":
                return activations.static_fp8(fp8.scale_of(amax))
            if not self._plan.recipe.input_scales:
                return activations.dynamic()
            return activations.static(GlobalScale.from_amax(amax))

        if number is not None and number < self._layers:
            cache = Observed() if caches else None
            self._walk.layer(number, list(places), choose, activation, cache)
            for place, attention in caches.items():
                found[place] = [self._cache(attention, cache)], []
        elif places:
            self._walk.tail(list(places), choose, activation)
        return found

    def _cache(self, attention: str, cache: Observed | None) -> CacheScales:
        assert cache is not None
        if cache.keys_amax is None or cache.values_amax is None:
            raise UnsupportedError(
                f"{attention} hands no keys and values to a cache in transformers, so that their "
                "scales cannot be found: leave out --kv-cache."
            )
        key, value = cache.keys_amax.item(), cache.values_amax.item()
        self.statistics.keys[attention], self.statistics.values[attention] = key, value
        return CacheScales.from_amax(key, value, self._plan.recipe.kv_cache)

    def _quantized(
        self, job: Job, weights: list[Tensor], seen: Seen
    ) -> tuple[list[Stored] | list[StoredFp8], list[str]]:
        _check_finite(job.members[0].module, seen.amax)
        inputs = Inputs(seen.amax, seen.whole.mean_square, seen.whole.tokens)
        self.statistics.inputs.update({member.module: inputs for member in job.members})
        maxima = [kernels.amax(weight) for weight in weights]
        compute.check_maxima(job, maxima, self._plan.source.read)
        results, warnings = compute.calibrated(job, weights, maxima, self._plan.recipe, seen)
        if seen.whole.tokens == 0:
            warnings.append(
                f"No token of the calibration text has reached {job.members[0].module}."
            )
        return results, warnings


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """TF32 on a GPU, some ten times as fast: sums over thousands of tokens bear its rounding."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _served(stored: Stored | StoredFp8) -> Tensor | Split:
    """What a layer computes with in the place of a matrix."""
    if isinstance(stored, StoredFp8):
        return fp8.decode(stored.values, stored.scale)
    weight = kernels.dequantize(stored.weight, torch.float32)
    if stored.branch is None:
        return weight
    branch = stored.branch.product()
    return Split(weight + branch, branch)


def _check_finite(module: str, amax: float) -> None:
    if not math.isfinite(amax):
        raise WeightError(
            f"The inputs of {module} are not finite on the calibration text: look for the tensor "
            "with `nvfp4 inspect MODEL --strict`, or name another text."
        )


def on_host(stored: Stored | StoredFp8) -> Stored | StoredFp8:
    """The same in the memory that files are written from."""
    if isinstance(stored, StoredFp8):
        return replace(stored, values=stored.values.cpu())
    weight = stored.weight
    host = replace(weight, packed=weight.packed.cpu(), block_scale=weight.block_scale.cpu())
    branch = stored.branch and LowRank(stored.branch.down.cpu(), stored.branch.up.cpu())
    return replace(stored, weight=host, branch=branch)


def folded(plan: Plan) -> Tensors:
    """How each tensor of the folded model is read, unquantised, under the source's names."""
    found: dict[str, Callable[[], Tensor]] = {}
    for member in plan.members:
        if member.action == "cache":
            continue
        found.setdefault(
            member.source.name if member.piece else member.name, partial(_folded, plan, member)
        )
    return found


def _folded(plan: Plan, member: Member) -> Tensor:
    read = plan.source.read
    data = read(member.source.name)
    if not member.edits:
        return data
    turned = member.piece.transposed if member.piece else member.transposed
    return fold.apply(data, member.edits, read, transposed=turned)


def _batches(tokens: Tensor, limit: int) -> tuple[list[Tensor], list[Tensor]]:
    """To choose by, and held out: [B, T] each, of at most `limit` tokens or one sequence."""
    held_out = max(1, len(tokens) // _HELD_OUT)
    size = max(1, limit // tokens.shape[1])
    return list(tokens[:-held_out].split(size)), list(tokens[-held_out:].split(size))


def _memory(device: torch.device) -> int:
    """Bytes that are free for what is remembered."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // 2
    return _HOST_BYTES


def stage_number(stage: str) -> int | None:
    """The number of the decoder layer in a job's stage."""
    found = re.fullmatch(r"layer (\d+)", stage)
    return int(found[1]) if found else None
