"""What a checkpoint may be compared with: the unquantised model it was made from."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import CheckpointError
from nvfp4cli.layouts import open_weights
from nvfp4cli.runtime.model import configuration, load_tokenizer
from nvfp4cli.runtime.text import leading_bos, tokenize

_NEXT_STEP = "name the checkpoint that the model was made from."


def check_baseline(
    folder: Path, config: PreTrainedConfig, text: str, tokens: Tensor, bos: int | None
) -> None:
    """Refuse a baseline that is quantised, of another model type, or that reads other tokens.

    folder: of the baseline. config: of the model. tokens: int64 [T], the first T of `text` by the
    model's tokenizer. bos: what `leading_bos` says of it. Models of one type, vocabulary and
    tokenizer are not told apart. Raises CheckpointError, from headers and small files alone.
    """
    checkpoint = open_checkpoint(folder)
    if open_weights(checkpoint).layout is not None:
        raise CheckpointError(f"The baseline {folder} is itself quantised: {_NEXT_STEP}")
    text_configs = [c.get_text_config() for c in (config, configuration(folder))]
    ours, theirs = (c.model_type for c in text_configs)
    if ours != theirs:
        raise CheckpointError(
            f"The baseline is a {theirs} model and the checkpoint a {ours} model: {_NEXT_STEP}"
        )
    ours, theirs = (c.vocab_size for c in text_configs)
    if ours != theirs:
        raise CheckpointError(
            f"The baseline's vocabulary has {theirs} entries and the model's {ours}: {_NEXT_STEP}"
        )
    tokenizer = load_tokenizer(folder)
    same = torch.equal(tokenize(tokenizer, text, len(tokens)), tokens)
    if not same or leading_bos(tokenizer) != bos:
        raise CheckpointError(
            f"The tokenizer of the baseline {folder} reads the text as other tokens than the "
            f"model's: {_NEXT_STEP}"
        )
