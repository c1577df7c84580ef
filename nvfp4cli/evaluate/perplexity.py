"""Perplexity of a causal language model, and its divergence from a baseline on the same tokens."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from nvfp4cli.errors import CheckpointError, RecipeError

# Bytes of one fp32 [rows, vocabulary] array. Up to four live at once, 256 MiB, on top of the
# logits that the models return.
_CHUNK_BYTES = 64 * 2**20

_Z95 = NormalDist().inv_cdf(0.975)  # 1.96


@dataclass(frozen=True)
class Scores:
    """What `evaluate` measured. Natural logarithms throughout; sums were taken in float64.

    window_nll: sum of -log p over the tokens each window scores. window_tokens: their numbers.
    The last three are None without a baseline. kl_divergence: mean over the scored tokens of
    KL(baseline || model) in nats. top1_agreement: share of them where both models' most probable
    token is the same.
    """

    window_nll: tuple[float, ...]
    window_tokens: tuple[int, ...]
    baseline_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens scored."""
        return sum(self.window_tokens)

    @property
    def nll(self) -> float:
        """Sum of -log p over all scored tokens, in nats."""
        return math.fsum(self.window_nll)

    @property
    def perplexity(self) -> float:
        """exp of the mean -log p per scored token."""
        return _exp(self.nll / self.tokens)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the perplexity, with windows as the sampling unit.

        The mean m = sum(nll_w) / sum(n_w) is a ratio of window totals; its variance is
        k / (k - 1) * sum((nll_w - m * n_w)^2) / sum(n_w)^2 for k windows (Cochran, Sampling
        Techniques, chapter 6), and the limits are exp(m -+ 1.96 * sd). None for one window.
        It says how the text, not the model, varies: two models on the same text are far closer
        to each other than their intervals are wide.
        """
        k = len(self.window_nll)
        if k < 2:
            return None
        mean = self.nll / self.tokens
        squares = math.fsum(
            (nll - mean * n) ** 2
            for nll, n in zip(self.window_nll, self.window_tokens, strict=True)
        )
        deviation = math.sqrt(k / (k - 1) * squares) / self.tokens
        return _exp(mean - _Z95 * deviation), _exp(mean + _Z95 * deviation)


@dataclass(frozen=True)
class _Windows:
    """Windows of one length that run in one batch.

    inputs, targets: int64 [B, n]; targets[b, p] follows inputs[b, p]. first: position in each
    row from which targets are scored; an earlier window has scored those before.
    """

    inputs: Tensor
    targets: Tensor
    first: tuple[int, ...]


@torch.inference_mode()
def evaluate(  # noqa: PLR0913 - the models, the tokens and the four facts that fix the protocol
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    context: int,
    stride: int,
    batch_size: int,
    bos: int | None,
    baseline: PreTrainedModel | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score a token stream t[0], ..., t[T-1] in windows of `context` inputs.

    tokens: int64 [T], without special tokens. bos: the id the tokenizer puts before every text,
    or None. progress: called with (windows done, windows in all) after each batch.

    The targets are y = t with a BOS, and y = t[1:] without one, where t[0] has nothing to be
    predicted from. Window i covers the targets y[i*stride : i*stride + context]. Its inputs are
    the tokens just before each of them: t[i*stride : i*stride + context] without a BOS, and with
    one BOS, t[i*stride], ..., t[i*stride + context - 2]. So a BOS stands first in every window, is
    one of its `context` inputs, and is never scored. Window 0 scores all its targets; each later
    window scores those that no earlier one has, the last `stride`. The windows end with the
    first that reaches y's end, which may be shorter. Every target is scored exactly once, after
    at least `context - stride + 1` inputs except in window 0. stride == context gives windows
    that do not overlap.

    A window shorter than the others runs in a batch of its own, so nothing is ever padded and
    the batch size changes only the order of additions inside matrix products.

    Log-probabilities are computed in fp32 and summed in float64. A baseline runs on
    the same windows and must have the same vocabulary.

    Raises what `check_windows` raises, and CheckpointError for a vocabulary that differs from the
    baseline's.
    """
    check_windows(
        model.config, tokens, context=context, stride=stride, batch_size=batch_size, bos=bos
    )
    total = _window_count(len(tokens) - (bos is None), context, stride)
    sums = []
    for batch in _batches(tokens, context, stride, batch_size, bos):
        logits = _logits(model, batch.inputs)
        reference = None if baseline is None else _logits(baseline, batch.inputs)
        sums.extend(_score(batch, logits, reference))
        if progress is not None:
            progress(len(sums), total)
    return _scores(sums, compared=baseline is not None)


@dataclass(frozen=True)
class _Sums:
    """Sums over the tokens one window, or a chunk of it, scores; zero where not compared."""

    tokens: int = 0
    nll: float = 0.0
    baseline_nll: float = 0.0
    kl: float = 0.0
    agreeing: int = 0

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.tokens + other.tokens,
            self.nll + other.nll,
            self.baseline_nll + other.baseline_nll,
            self.kl + other.kl,
            self.agreeing + other.agreeing,
        )


def context_limit(config: PreTrainedConfig) -> float:
    """Most tokens the model takes at once; infinite where its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def check_windows(
    config: PreTrainedConfig,
    tokens: Tensor,
    *,
    context: int,
    stride: int,
    batch_size: int,
    bos: int | None,
) -> None:
    """Refuse what `evaluate` cannot score, from the configuration alone.

    Raises RecipeError if there are no targets, if `context`, `stride` or `batch_size` makes no
    sense or `context` is longer than the model's, and CheckpointError for tokens that the model's
    vocabulary lacks.
    """
    if len(tokens) - (bos is None) < 1:
        raise RecipeError("The text has no token to score: name a longer one with --text.")
    vocabulary = getattr(config.get_text_config(), "vocab_size", math.inf)
    highest = max(int(tokens.max()), bos or 0)
    if highest >= vocabulary:
        raise CheckpointError(
            f"The tokenizer gives the token {highest}, and the model's vocabulary has {vocabulary} "
            "entries: copy the tokenizer files of the source model into the checkpoint."
        )
    if not 1 <= stride <= context:
        raise RecipeError(
            f"A stride of {stride} in a context of {context} tokens would "
            f"{'leave tokens unscored' if stride > context else 'never advance'}: choose --stride "
            "between 1 and --context."
        )
    if batch_size < 1:
        raise RecipeError(f"A batch of {batch_size} windows is empty: choose at least 1.")
    limit = context_limit(config)
    if context > limit:
        raise RecipeError(
            f"A context of {context} tokens is longer than the model's {limit}: choose a "
            "--context up to that."
        )


def _window_count(targets: int, context: int, stride: int) -> int:
    return 1 + max(0, -(-(targets - context) // stride))


def _batches(
    tokens: Tensor, context: int, stride: int, batch_size: int, bos: int | None
) -> Iterator[_Windows]:
    """All windows in order, `batch_size` at a time, a shorter last one by itself."""
    if bos is None:
        before, targets = tokens[:-1], tokens[1:]
    else:
        before, targets = torch.cat([tokens.new_tensor([bos]), tokens[:-1]]), tokens
    count = _window_count(len(targets), context, stride)
    full = count if (count - 1) * stride + context <= len(targets) else count - 1
    groups = [range(i, min(i + batch_size, full)) for i in range(0, full, batch_size)]
    if full < count:
        groups.append(range(full, count))
    for group in groups:
        spans = [slice(i * stride, i * stride + context) for i in group]
        inputs = torch.stack([before[span] for span in spans])
        if bos is not None:
            inputs[:, 0] = bos
        yield _Windows(
            inputs,
            torch.stack([targets[span] for span in spans]),
            tuple(context - stride if i else 0 for i in group),
        )


def _logits(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """[B, n, V] in the model's dtype."""
    return model(input_ids=inputs.to(model.device), use_cache=False).logits


def _score(batch: _Windows, logits: Tensor, reference: Tensor | None) -> list[_Sums]:
    """The sums of each window of a batch."""
    if reference is not None and reference.shape != logits.shape:
        raise CheckpointError(
            f"The baseline's vocabulary has {reference.shape[-1]} entries and the model's "
            f"{logits.shape[-1]}: name the checkpoint that the model was made from."
        )
    rows = max(1, _CHUNK_BYTES // (4 * logits.shape[-1]))
    windows = []
    for b, first in enumerate(batch.first):
        window = _Sums()
        for start in range(first, batch.targets.shape[1], rows):
            span = slice(start, start + rows)
            window += _chunk(
                batch.targets[b, span],
                logits[b, span],
                None if reference is None else reference[b, span],
            )
        windows.append(window)
    return windows


def _chunk(targets: Tensor, logits: Tensor, reference: Tensor | None) -> _Sums:
    """targets: int64 [R]; logits, reference: [R, V]."""
    targets = targets.to(logits.device)
    log_q = _log_softmax(logits)
    nll = _nll(log_q, targets)
    if reference is None:
        return _Sums(len(targets), nll)
    reference = reference.to(logits.device)
    log_p = _log_softmax(reference)
    # Of the logits themselves: rounding in the logarithms can make ties.
    agreeing = int((reference.argmax(dim=-1) == logits.argmax(dim=-1)).sum())
    baseline_nll = _nll(log_p, targets)
    kl = (log_p - log_q).mul_(log_p.exp()).sum(dtype=torch.float64)
    return _Sums(len(targets), nll, baseline_nll, kl.item(), agreeing)


def _log_softmax(logits: Tensor) -> Tensor:
    """fp32. torch's own is biased by 2.5e-6 a token over a vocabulary of 49,152, this by 1e-8."""
    wide = logits.float()
    return wide - wide.logsumexp(dim=-1, keepdim=True)


def _nll(log_probabilities: Tensor, targets: Tensor) -> float:
    picked = log_probabilities.gather(-1, targets[:, None])
    return -picked.sum(dtype=torch.float64).item()


def _scores(sums: list[_Sums], compared: bool) -> Scores:
    nll = tuple(window.nll for window in sums)
    counts = tuple(window.tokens for window in sums)
    if not compared:
        return Scores(nll, counts)
    tokens = sum(counts)
    return Scores(
        nll,
        counts,
        baseline_perplexity=_exp(math.fsum(window.baseline_nll for window in sums) / tokens),
        kl_divergence=math.fsum(window.kl for window in sums) / tokens,
        top1_agreement=sum(window.agreeing for window in sums) / tokens,
    )


def _exp(x: float) -> float:
    """e^x, infinite beyond float64: a broken model has a perplexity, not an exception."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
