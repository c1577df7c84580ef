"""The command that measures: eval."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast, get_args

import torch

from nvfp4cli.checkpoint import hub
from nvfp4cli.cli import console
from nvfp4cli.cli.device import pick
from nvfp4cli.errors import CheckpointError, UsageError
from nvfp4cli.evaluate.baseline import check_baseline
from nvfp4cli.evaluate.perplexity import Scores, check_windows, context_limit, evaluate
from nvfp4cli.runtime.model import configuration, load, load_tokenizer
from nvfp4cli.runtime.served import Activations, serve, served
from nvfp4cli.runtime.text import leading_bos, load_text, tokenize

DEFAULT_CONTEXT = 1024
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = get_args(Activations)


@dataclass(frozen=True)
class Options:
    """How to measure, as `evaluate.perplexity.evaluate` says.

    Raises UsageError for what no model could be measured with.
    """

    context: int | None  # None: 1024, or what the model takes if that is less
    stride: int | None  # None: as many as the context
    max_tokens: int | None
    batch_size: int
    dtype: str
    device: str
    activations: str = "declared"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype is {self.dtype!r}: choose one of {', '.join(DTYPES)}.")
        if self.activations not in ACTIVATIONS:
            raise UsageError(
                f"--activations is {self.activations!r}: choose one of {', '.join(ACTIVATIONS)}."
            )
        context = self.context or DEFAULT_CONTEXT
        if self.stride is not None and self.stride > context:
            raise UsageError(
                f"--stride {self.stride} in a --context of {context} tokens would leave tokens "
                f"unscored: choose a --stride up to {context}, or a longer --context."
            )


class _Protocol(TypedDict):
    """The options of `evaluate.perplexity.evaluate`, settled for one model."""

    context: int
    stride: int
    batch_size: int
    bos: int | None


def perplexity(
    checkpoint: str, baseline: str | None, text: Path | None, options: Options, *, as_json: bool
) -> None:
    """Measure one checkpoint, against its original if one is named.

    Everything that can be refused is refused before a model is loaded.
    """
    dtype, device = getattr(torch, options.dtype), pick(options.device)
    own = load_text(str(text)) if text is not None else None  # before anything is downloaded
    folder = hub.resolve(checkpoint)
    original = hub.resolve(baseline) if baseline is not None else None
    words = own or load_text()
    config, tokenizer = configuration(folder), load_tokenizer(folder)
    tokens, bos = tokenize(tokenizer, words.text, options.max_tokens), leading_bos(tokenizer)
    context = options.context or int(min(DEFAULT_CONTEXT, context_limit(config)))
    protocol = _Protocol(
        context=context,
        stride=options.stride or context,
        batch_size=options.batch_size,
        bos=bos,
    )
    check_windows(config, tokens, **protocol)
    if original is not None:
        check_baseline(original, config, words.text, tokens, bos)
    console.say(f"Measuring on {words.name}, {len(tokens)} tokens.")
    mode = cast(Activations, options.activations)
    model = serve(folder, mode, dtype=dtype, device=device)
    reference = load(original, dtype=dtype, device=device) if original is not None else None
    with console.counter() as bar:
        task = bar.add_task("windows", total=None)
        scores = evaluate(
            model,
            tokens,
            **protocol,
            baseline=reference,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _check_finite(checkpoint, scores.nll)
    _check_finite(baseline, scores.baseline_perplexity)
    facts: dict[str, Any] = {
        "checkpoint": checkpoint,
        "baseline": baseline,
        "text": words.name,
        "text_sha256": words.sha256,
        **protocol,
        "bos": bos is not None,
        "dtype": options.dtype,
        "device": device,
        "windows": len(scores.window_nll),
        "activations": served(folder, mode),
        **_measured(scores),
    }
    if as_json:
        console.print_json(facts)
    else:
        _print(facts)


def _check_finite(name: str | None, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise CheckpointError(
            f"{name} computes values that are not finite: look for the tensor with "
            f"`nvfp4 inspect {name} --strict`."
        )


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
        ("activations", facts["activations"]),
        ("computed in", f"{facts['dtype']} on {facts['device']}"),
    ]
    console.facts(facts["checkpoint"], rows)
