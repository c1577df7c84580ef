"""Calibration text: what a method chooses codes and scales by."""

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.errors import RecipeError
from nvfp4cli.runtime.text import Text, built_in, from_hub, load_text

_HUB = "hf://datasets/"


@dataclass(frozen=True)
class Sequences:
    """tokens: int64 [sequences, length]. facts: what has to be the same for the same bytes."""

    tokens: Tensor
    facts: dict[str, str | int]


def calibration_text(name: str | None) -> Text:
    """The text of a file, of a file in a dataset of the hub, or one that needs no network.

    name: a text or .jsonl file (each line an object with "text", or with "messages"), the same as
    hf://datasets/OWNER/NAME/FILE, or None: the language reference in Python's own pydoc. Raises
    RecipeError for one that cannot be read.
    """
    if name is None:
        return built_in()
    text = from_hub(name.removeprefix(_HUB)) if name.startswith(_HUB) else load_text(name)
    return _joined(text) if name.endswith((".jsonl", ".json")) else text


def cut(ids: Tensor, text: Text, count: int, length: int, bos: int | None) -> Sequences:
    """The first `count` pieces of `length` tokens; each begins with the BOS where there is one.

    ids: int64 [T], of the text without special tokens. Raises RecipeError where the text gives
    fewer than two.
    """
    own = length - (bos is not None)
    found = min(count, len(ids) // own)
    if found < 2:
        raise RecipeError(
            f"{text.name} has {len(ids)} tokens, which are not two sequences of {length}: name a "
            "longer text with --text, or shorten them with --sequence-length."
        )
    tokens = ids[: found * own].view(found, own)
    if bos is not None:
        tokens = torch.cat([torch.full((found, 1), bos), tokens], dim=1)
    return Sequences(
        tokens,
        {
            "text": text.name,
            "text_sha256": text.sha256,
            "sequences": found,
            "sequence_length": length,
        },
    )


def at_random(vocabulary: int, count: int, length: int, seed: int) -> Sequences:
    """Tokens drawn at random, for a model that nobody has text for."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (count, length), generator=generator)
    return Sequences(
        tokens,
        {
            "text": "random tokens",
            "text_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            "sequences": count,
            "sequence_length": length,
        },
    )


def _joined(text: Text) -> Text:
    """The documents of JSON lines, one after the other."""
    documents = []
    for number, line in enumerate(text.text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            if "messages" in document:
                parts = [f"{one['role']}\n{one['content']}" for one in document["messages"]]
                documents.append("\n\n".join(parts))
            else:
                documents.append(document["text"])
        except (ValueError, KeyError, TypeError):
            raise RecipeError(
                f'Line {number} of {text.name} is no JSON object with "text" or "messages": '
                "correct it, or name a plain text file."
            ) from None
    return Text("\n\n".join(documents), text.name, text.sha256)
