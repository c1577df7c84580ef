"""The scoring protocol against hand-written loops over single tokens."""

import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from nvfp4cli.errors import CheckpointError, RecipeError
from nvfp4cli.evaluate import perplexity
from nvfp4cli.evaluate.perplexity import Scores, evaluate

VOCABULARY = 256
BOS = 7


def tiny_llama(seed: int, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=256,
        initializer_range=0.2,  # logits far from uniform, so that a wrong target shows
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(0)


@pytest.fixture(scope="module")
def other() -> LlamaForCausalLM:
    return tiny_llama(1)


@pytest.fixture(scope="module")
def stream() -> Tensor:
    return torch.randint(8, VOCABULARY, (1000,), generator=torch.Generator().manual_seed(0))


def windows_by_hand(
    tokens: list[int], context: int, stride: int, bos: int | None
) -> list[tuple[list[int], list[int], int]]:
    """(inputs, targets, first scored position) of each window, from the protocol's words."""
    found, scored_to, i = [], 0 if bos is not None else 1, 0
    while scored_to < len(tokens):
        a = i * stride
        if bos is None:
            inputs, targets = tokens[a : a + context], tokens[a + 1 : a + context + 1]
            first_target = a + 1
        else:
            inputs, targets = [bos, *tokens[a : a + context - 1]], tokens[a : a + context]
            first_target = a
        found.append((inputs[: len(targets)], targets, scored_to - first_target))
        scored_to = first_target + len(targets)
        i += 1
    return found


@torch.no_grad()
def log_probabilities_by_hand(model, stream, context, stride, bos) -> Tensor:
    """[scored tokens, V] in float64, and the targets."""
    rows, targets = [], []
    for inputs, following, first in windows_by_hand(stream.tolist(), context, stride, bos):
        logits = model(input_ids=torch.tensor([inputs])).logits[0, first:]
        rows.append(logits.double().log_softmax(-1))
        targets += following[first:]
    return torch.cat(rows), torch.tensor(targets)


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("stride", [64, 128])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_equals_a_loop_written_by_hand(model, stream, stride, batch_size, bos):
    log_q, targets = log_probabilities_by_hand(model, stream, 128, stride, bos)
    expected = -log_q.gather(1, targets[:, None]).mean()
    scores = evaluate(model, stream, context=128, stride=stride, batch_size=batch_size, bos=bos)
    assert scores.tokens == len(targets) == len(stream) - (bos is None)
    assert math.log(scores.perplexity) == pytest.approx(expected.item(), rel=1e-5)
    # The model is not near uniform, or the comparison above would say little.
    assert abs(scores.perplexity / VOCABULARY - 1) > 0.1


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("stride", [64, 128])
def test_a_zero_head_has_the_vocabulary_as_perplexity(stream, stride, bos):
    model = tiny_llama(0)
    torch.nn.init.zeros_(model.lm_head.weight)
    scores = evaluate(model, stream, context=128, stride=stride, batch_size=4, bos=bos)
    # log 256 in fp32 is off by at most 2^-22 (half a step of 2^-21 in [4, 8)).
    assert scores.perplexity == pytest.approx(256.0, rel=2**-22)
    low, high = scores.interval
    assert low == pytest.approx(high, rel=1e-6)


class Recorder(torch.nn.Module):
    """Keeps the inputs it is called with; its logits are all zero."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=length, max_position_embeddings=length)
        self.device = torch.device("cpu")
        self.length = length
        self.batches: list[Tensor] = []

    def forward(self, input_ids: Tensor, use_cache: bool) -> CausalLMOutput:
        assert not use_cache
        self.batches.append(input_ids)
        return CausalLMOutput(logits=torch.zeros(*input_ids.shape, self.length))


@pytest.mark.parametrize("bos", [None, 999])
@pytest.mark.parametrize(
    ("length", "context", "stride"),
    [(300, 128, 64), (300, 128, 128), (256, 128, 128), (257, 128, 128), (258, 128, 128),
     (129, 128, 1), (50, 128, 64), (2, 128, 64), (130, 128, 127), (200, 10, 3)],
)  # fmt: skip
def test_each_token_is_scored_exactly_once(monkeypatch, length, context, stride, bos):
    scored: list[int] = []
    chunk = perplexity._chunk

    def record(targets: Tensor, logits: Tensor, reference: Tensor | None):
        scored.extend(targets.tolist())
        return chunk(targets, logits, reference)

    monkeypatch.setattr(perplexity, "_chunk", record)
    model = Recorder(1000)
    scores = evaluate(
        model, torch.arange(length), context=context, stride=stride, batch_size=4, bos=bos
    )
    assert scored == list(range(bos is None, length))  # in order, and a BOS (999) never
    assert scores.tokens == len(scored)
    assert len(scores.window_nll) == sum(len(batch) for batch in model.batches)
    expected = windows_by_hand(list(range(length)), context, stride, bos)
    seen = [row.tolist() for batch in model.batches for row in batch]
    assert seen == [inputs for inputs, _, _ in expected]
    if bos is not None:
        assert all(row[0] == bos and bos not in row[1:] for row in seen)
    assert all(batch.shape[1] <= context and len(batch) <= 4 for batch in model.batches)


def test_a_bos_fills_a_place_of_the_context(model, stream):
    evaluate(model, stream, context=256, stride=256, batch_size=2, bos=BOS)
    with pytest.raises(RecipeError, match="context of 257 tokens is longer than the model's 256"):
        evaluate(model, stream, context=257, stride=256, batch_size=2, bos=BOS)


def test_a_model_against_itself(model, stream):
    scores = evaluate(model, stream, context=128, stride=64, batch_size=4, bos=None, baseline=model)
    assert scores.kl_divergence == 0.0
    assert scores.top1_agreement == 1.0
    assert scores.baseline_perplexity == scores.perplexity


@pytest.mark.parametrize("bos", [None, BOS])
def test_comparison_equals_one_by_hand(model, other, stream, bos):
    log_q, targets = log_probabilities_by_hand(model, stream, 128, 64, bos)
    log_p, _ = log_probabilities_by_hand(other, stream, 128, 64, bos)
    scores = evaluate(model, stream, context=128, stride=64, batch_size=4, bos=bos, baseline=other)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean()
    base = -log_p.gather(1, targets[:, None]).mean()
    assert scores.kl_divergence == pytest.approx(kl.item(), rel=1e-5)
    assert scores.top1_agreement == pytest.approx(agreement.item(), abs=0)
    assert math.log(scores.baseline_perplexity) == pytest.approx(base.item(), rel=1e-5)


def test_kl_has_the_baseline_first():
    logits = torch.tensor([[0.0, 0.0]])  # q = (1/2, 1/2)
    reference = torch.tensor([[math.log(3.0), 0.0]])  # p = (3/4, 1/4)
    sums = perplexity._chunk(torch.tensor([1]), logits, reference)
    assert sums.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)
    assert sums.nll == pytest.approx(math.log(2), rel=1e-6)
    assert sums.baseline_nll == pytest.approx(math.log(4), rel=1e-6)


def test_no_baseline_no_comparison(model, stream):
    scores = evaluate(model, stream[:100], context=50, stride=50, batch_size=1, bos=None)
    assert scores.kl_divergence is scores.top1_agreement is scores.baseline_perplexity is None


def test_chunks_of_the_vocabulary_change_nothing_but_the_last_bits(
    monkeypatch, model, other, stream
):
    arguments = {"context": 128, "stride": 64, "batch_size": 4, "bos": BOS, "baseline": other}
    whole = evaluate(model, stream, **arguments)
    rows: list[int] = []
    chunk = perplexity._chunk

    def record(targets: Tensor, logits: Tensor, reference: Tensor | None):
        rows.append(len(targets))
        return chunk(targets, logits, reference)

    monkeypatch.setattr(perplexity, "_chunk", record)
    monkeypatch.setattr(perplexity, "_CHUNK_BYTES", 4 * VOCABULARY * 10)  # ten rows
    pieces = evaluate(model, stream, **arguments)
    assert max(rows) == 10
    assert pieces.window_tokens == whole.window_tokens
    assert pieces.window_nll == pytest.approx(whole.window_nll, rel=1e-6)
    assert pieces.kl_divergence == pytest.approx(whole.kl_divergence, rel=1e-6)
    assert pieces.top1_agreement == whole.top1_agreement


def test_half_precision_logits_are_scored_in_fp32(stream):
    model = tiny_llama(0).to(torch.bfloat16)
    torch.nn.init.zeros_(model.lm_head.weight)
    scores = evaluate(model, stream, context=128, stride=128, batch_size=4, bos=None)
    assert scores.perplexity == pytest.approx(256.0, rel=2**-22)  # in bf16: log 256 = 5.53


def test_interval_of_equal_windows_is_the_textbook_one():
    nll = (10.0, 12.0, 11.0, 15.0)  # of 10 tokens each
    scores = Scores(nll, (10, 10, 10, 10))
    mean = sum(nll) / 40
    variance = sum((x / 10 - mean) ** 2 for x in nll) / 3  # of one window's mean
    margin = 1.959964 * math.sqrt(variance / 4)
    assert scores.perplexity == pytest.approx(math.exp(mean))
    assert scores.interval == pytest.approx((math.exp(mean - margin), math.exp(mean + margin)))


def test_interval_weighs_windows_by_their_tokens():
    # A window of no surprise to the mean does not widen the interval, whatever its length.
    low, high = Scores((20.0, 40.0, 2.0), (10, 20, 1)).interval
    assert low == pytest.approx(high) == pytest.approx(math.exp(2))
    assert Scores((20.0,), (10,)).interval is None


def test_a_perplexity_beyond_float64_is_infinite():
    assert Scores((8000.0,), (10,)).perplexity == math.inf


def test_progress_counts_windows(model, stream):
    seen: list[tuple[int, int]] = []
    evaluate(
        model, stream, context=128, stride=128, batch_size=3, bos=None,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(3, 8), (6, 8), (7, 8), (8, 8)]  # 999 targets: 7 full windows and one short


def test_vocabularies_must_agree(model, stream):
    with pytest.raises(CheckpointError, match="256 entries and the model's 128"):
        evaluate(
            tiny_llama(0, 128), stream % 128, context=64, stride=64, batch_size=1, bos=None,
            baseline=model,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"stride": 65}, "stride of 65 in a context of 64 tokens would leave tokens unscored"),
        ({"stride": 0}, "would never advance"),
        ({"batch_size": 0}, "choose at least 1"),
    ],
)
def test_settings_that_make_no_sense(model, stream, changed, sentence):
    arguments = {"context": 64, "stride": 64, "batch_size": 1, "bos": None} | changed
    with pytest.raises(RecipeError, match=sentence):
        evaluate(model, stream, **arguments)


def test_a_text_without_targets(model, stream):
    arguments = {"context": 64, "stride": 64, "batch_size": 1}
    with pytest.raises(RecipeError, match="no token to score"):
        evaluate(model, stream[:1], bos=None, **arguments)
    assert evaluate(model, stream[:1], bos=BOS, **arguments).tokens == 1
