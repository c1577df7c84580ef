"""Text to sequences of tokens."""

import json

import pytest
import torch

from nvfp4cli.calibrate.text import at_random, calibration_text, cut
from nvfp4cli.errors import RecipeError
from nvfp4cli.runtime.text import Text

TEXT = Text("words", "a file", "0" * 64)
IDS = torch.arange(100)


def test_sequences_are_the_first_pieces_of_the_text():
    found = cut(IDS, TEXT, 3, 16, None)
    assert torch.equal(found.tokens, IDS[:48].view(3, 16))
    assert found.facts == {
        "text": "a file", "text_sha256": "0" * 64, "sequences": 3, "sequence_length": 16,
    }  # fmt: skip
    assert cut(IDS, TEXT, 50, 16, None).facts["sequences"] == 6


def test_each_begins_with_the_bos_of_the_tokenizer():
    tokens = cut(IDS, TEXT, 2, 16, 7).tokens
    assert torch.equal(tokens[:, 0], torch.full((2,), 7))
    assert torch.equal(tokens[:, 1:], IDS[:30].view(2, 15))


def test_a_text_too_short_is_refused():
    with pytest.raises(RecipeError, match="has 100 tokens, which are not two sequences of 64"):
        cut(IDS, TEXT, 2, 64, None)


def test_the_lines_of_a_dataset(tmp_path):
    path = tmp_path / "d.jsonl"
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    lines = [{"text": "One."}, {"messages": talk}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    assert calibration_text(str(path)).text == "One.\n\nuser\nHi.\n\nassistant\nYes?"
    path.write_text('{"text": "One."}\n{"body": 1}', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"Line 2 of .* is no JSON object with"):
        calibration_text(str(path))
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(RecipeError, match="Line 1 of"):
        calibration_text(str(path))


def test_the_built_in_text_needs_no_network():
    assert "language reference" in calibration_text(None).name
    assert len(calibration_text(None).text) > 300_000


def test_random_tokens_are_those_of_the_seed():
    one, same, other = (at_random(50, 4, 32, seed) for seed in (1, 1, 2))
    assert torch.equal(one.tokens, same.tokens)
    assert one.facts == same.facts
    assert not torch.equal(one.tokens, other.tokens)
    assert one.facts["text_sha256"] != other.facts["text_sha256"]
    assert (one.tokens.min(), one.tokens.max()) == (0, 49)
