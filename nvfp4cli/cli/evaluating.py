"""The command that measures: eval."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvfp4cli.checkpoint import hub
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli import console
from nvfp4cli.cli.device import pick
from nvfp4cli.errors import CheckpointError, RecipeError
from nvfp4cli.evaluate.model import load, load_tokenizer
from nvfp4cli.evaluate.perplexity import Scores, context_limit, evaluate
from nvfp4cli.evaluate.text import leading_bos, load_text, tokenize
from nvfp4cli.layouts import open_weights

DEFAULT_CONTEXT = 1024
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """How to measure: see `evaluate.perplexity.evaluate`."""

    context: int | None  # None: 1024, or what the model takes if that is less
    stride: int | None  # None: as many as the context
    max_tokens: int | None
    batch_size: int
    dtype: str
    device: str


def perplexity(
    checkpoint: str, baseline: str | None, text: Path | None, options: Options, *, as_json: bool
) -> None:
    """Measure one checkpoint, against its original if one is named."""
    if options.dtype not in DTYPES:
        raise RecipeError(f"--dtype is {options.dtype!r}: choose one of {', '.join(DTYPES)}.")
    dtype, device = getattr(torch, options.dtype), pick(options.device)
    folder = hub.resolve(checkpoint)
    original = hub.resolve(baseline) if baseline else None
    words = load_text(str(text) if text else None)
    tokenizer = load_tokenizer(folder)
    tokens = tokenize(tokenizer, words.text, options.max_tokens)
    bos = leading_bos(tokenizer)
    if open_weights(open_checkpoint(folder)).activations:
        console.warn(
            "The activations are computed unquantised: these figures are those of the weights."
        )
    console.say(f"Measuring on {words.name}, {len(tokens)} tokens.")
    model = load(folder, dtype=dtype, device=device)
    reference = load(original, dtype=dtype, device=device) if original else None
    context = options.context or int(min(DEFAULT_CONTEXT, context_limit(model)))
    stride = options.stride or context
    with console.counter() as bar:
        task = bar.add_task("windows", total=None)
        scores = evaluate(
            model,
            tokens,
            context=context,
            stride=stride,
            batch_size=options.batch_size,
            bos=bos,
            baseline=reference,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for name, value in ((checkpoint, scores.nll), (baseline, scores.baseline_perplexity)):
        if value is not None and not math.isfinite(value):
            raise CheckpointError(
                f"{name} computes values that are not finite: look for the tensor with "
                f"`nvfp4 inspect {name} --strict`."
            )
    facts = {
        "checkpoint": checkpoint,
        "baseline": baseline,
        "text": words.name,
        "text_sha256": words.sha256,
        "context": context,
        "stride": stride,
        "bos": bos is not None,
        "dtype": options.dtype,
        "device": device,
        "windows": len(scores.window_nll),
        **_measured(scores),
    }
    if as_json:
        console.print_json(facts)
    else:
        _print(facts)


def _measured(scores: Scores) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens": scores.tokens,
        "perplexity": scores.perplexity,
        "perplexity_95": scores.interval,
    }
    if scores.kl_divergence is not None:
        found |= {
            "baseline_perplexity": scores.baseline_perplexity,
            "kl_divergence": scores.kl_divergence,
            "top1_agreement": scores.top1_agreement,
        }
    return found


def _print(facts: dict[str, Any]) -> None:
    interval = facts["perplexity_95"]
    spread = f" (95 % by window: {interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    rows = [("perplexity", f"{facts['perplexity']:.4f}{spread}")]
    if "kl_divergence" in facts:
        rows += [
            ("baseline perplexity", f"{facts['baseline_perplexity']:.4f}"),
            ("KL divergence from the baseline", f"{facts['kl_divergence']:.5f} nats per token"),
            ("top-1 agreement with the baseline", f"{facts['top1_agreement']:.4f}"),
        ]
    rows += [
        ("text", f"{facts['text']} (sha256 {facts['text_sha256'][:12]})"),
        ("tokens scored", str(facts["tokens"])),
        (
            "windows",
            f"{facts['windows']} of {facts['context']} tokens, stride {facts['stride']}, "
            f"{'BOS first' if facts['bos'] else 'no BOS'}",
        ),
        ("computed in", f"{facts['dtype']} on {facts['device']}"),
    ]
    console.facts(facts["checkpoint"], rows)
