"""The text a model is measured on, and its tokens."""

import hashlib
import platform
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import (
    constants,
    hf_hub_download,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HTTPError
from torch import Tensor

from nvfp4cli.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WIKITEXT_REPO = "ggml-org/ci"  # the archive that llama.cpp's perplexity figures are taken on
WIKITEXT_ARCHIVE = "wikitext-2-raw-v1.zip"
WIKITEXT_MEMBER = "wikitext-2-raw/wiki.test.raw"

_PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class Text:
    """What was measured: `name` for the reader, `sha256` of the UTF-8 bytes for the record."""

    text: str
    name: str
    sha256: str


def load_text(path: str | None = None) -> Text:
    """The file `path`, or without one WikiText-2's raw test set, or a text that needs no network.

    The last is the language reference in Python's own `pydoc_data.topics`, about 460,000
    characters; it differs between Python versions, so the name gives the version. Perplexities
    compare only where `sha256` is the same.

    Raises RecipeError if the file is missing, empty or not UTF-8.
    """
    if path is not None:
        return _record(_read(Path(path)), path)
    archive = _wikitext_archive()
    if archive is not None:
        with zipfile.ZipFile(archive) as files:
            return _record(files.read(WIKITEXT_MEMBER), "WikiText-2 raw test")
    text = built_in()
    return replace(text, name=f"{text.name} (WikiText-2 is out of reach)")


def built_in() -> Text:
    """The language reference in Python's own pydoc, which differs between Python versions."""
    from pydoc_data.topics import topics

    joined = "\n\n".join(topics[topic] for topic in sorted(topics))
    name = f"Python {platform.python_version()} language reference"
    return _record(joined.encode(), name)


def from_hub(path: str) -> Text:
    """A text file in a dataset of the hub; path: OWNER/NAME/FILE.

    Raises RecipeError where the hub does not give it.
    """
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    try:
        found = hf_hub_download(f"{owner}/{name}", file, repo_type="dataset")
    except (HTTPError, OSError, ValueError) as error:
        raise RecipeError(
            f"hf://datasets/{path} cannot be had ({' '.join(str(error).split())}): name a text "
            "file with --text."
        ) from None
    return _record(Path(found).read_bytes(), f"hf://datasets/{path}")


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", text: str, max_tokens: int | None = None
) -> Tensor:
    """int64 [T]: the ids of `text` without special tokens, the first `max_tokens` of them."""
    # verbose=False: the stream is longer than the model's context on purpose.
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor(ids[:max_tokens], dtype=torch.int64)


def leading_bos(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The BOS id if the tokenizer itself puts it before a text, else None.

    Judged by what it does, since many tokenizers name a `bos_token` that their models never saw.
    """
    bos = tokenizer.bos_token_id
    with_special = tokenizer("x").input_ids
    without = tokenizer("x", add_special_tokens=False).input_ids
    return bos if with_special[:1] == [bos] != without[:1] else None


def _record(data: bytes, name: str) -> Text:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{name} is not UTF-8 text (byte {error.start}): convert it, or name another file "
            "with --text."
        ) from None
    if not text.strip():
        raise RecipeError(f"{name} holds no text: name another file with --text.")
    return Text(text, name, hashlib.sha256(data).hexdigest())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecipeError(
            f"{path} cannot be read ({error.strerror}): name a text file with --text."
        ) from None


def _wikitext_archive() -> str | None:
    """The archive from the local cache or the hub; None where neither can give it."""
    cached = try_to_load_from_cache(WIKITEXT_REPO, WIKITEXT_ARCHIVE, repo_type="dataset")
    if isinstance(cached, str):
        return cached
    if not _hub_answers():
        return None
    try:
        return hf_hub_download(WIKITEXT_REPO, WIKITEXT_ARCHIVE, repo_type="dataset")
    # HTTPError is that of the client the hub library uses; its name changed from httpx to httpx2.
    except (HTTPError, OSError):
        return None


def _hub_answers() -> bool:
    """Ask once and briefly: the hub library itself retries for some 24 s before it gives up."""
    if is_offline_mode():
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return True  # a refusal is an answer
    except OSError:
        return False
    return True
