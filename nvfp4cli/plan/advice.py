"""What an engine would say to a planned checkpoint, said before it is written."""

from nvfp4cli.layouts import branch
from nvfp4cli.layouts.record import Layout
from nvfp4cli.plan.record import Job, Member

# vLLM slices torchao's swizzled scales of a fused layer by rows and refuses other boundaries.
_TORCHAO_ROWS = 128
# Tensor-parallel slices and Marlin's tiles; what is no multiple is padded or refused.
_ENGINE_TILE = 64

DYNAMIC = (
    "torchao multiplies 4-bit activations on Blackwell GPUs only: to serve on others, use "
    "--layout compressed-tensors or modelopt."
)
_LOAD = "Load: transformers.AutoModelForCausalLM.from_pretrained({path!r})"


def next_step(jobs: list[Job], layout: Layout | None, rank: int | None) -> str:
    """What to do with the output: a command with {out} or code with {path!r} for its folder.

    rank: of low-rank branches, None without.
    """
    if rank is not None:
        return branch.SERVE
    if layout is None or (layout.NAME == "torchao" and _ragged(jobs)):
        return _LOAD
    return layout.SERVE


def warnings(jobs: list[Job], layout: Layout | None) -> list[str]:
    """Sentences for what an engine would refuse or run slowly, with the way out."""
    if layout is None:
        return []
    found = []
    if layout.NAME == "torchao" and (ragged := _ragged(jobs)):
        found.append(
            f"vLLM refuses the torchao layout where a part of a fused layer has rows that are no "
            f"multiple of {_TORCHAO_ROWS} ({_and_more(ragged)}): use --layout compressed-tensors "
            "to serve with vLLM; transformers loads it as it is."
        )
    experts = [m.name for m in _quantized(jobs) if ".experts." in m.name]
    if experts and layout.NAME == "compressed-tensors":
        found.append(
            "transformers up to 5.24 leaves out the global scale of experts in this layout and "
            f"computes nonsense without an error ({_and_more(experts)}): serve with vLLM, or "
            "measure with `nvfp4 eval`."
        )
    odd = [m for m in _quantized(jobs) if m.shape[0] % _ENGINE_TILE or m.shape[1] % _ENGINE_TILE]
    if odd:
        shapes = [f"{m.name} {list(m.shape)}" for m in odd]
        found.append(
            f"Engines' 4-bit kernels want shapes that are multiples of {_ENGINE_TILE} and pad or "
            f"refuse others ({_and_more(shapes)}): try the engine, or keep these layers with "
            "--ignore."
        )
    return found


def _quantized(jobs: list[Job]) -> list[Member]:
    return [m for job in jobs for m in job.members if m.action in ("quantize", "repack")]


def _ragged(jobs: list[Job]) -> list[str]:
    """Parts of fused layers whose rows do not end on a tile of swizzled scales."""
    return [m.name for m in _quantized(jobs) if m.fused and m.shape[0] % _TORCHAO_ROWS]


def _and_more(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{items[0]} and {len(items) - 1} more"
