"""Texts, their fallbacks without a network, and tokens."""

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import zipfile
from pydoc_data.topics import topics

import pytest
import torch
from huggingface_hub.errors import HTTPError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from nvfp4cli.errors import RecipeError
from nvfp4cli.runtime import text


def word_tokenizer(prepends_bos: bool) -> PreTrainedTokenizerFast:
    """Words a, b, c, x; names a BOS either way, and puts it before a text or not."""
    vocabulary = {"<s>": 0, "<unk>": 1, "a": 2, "b": 3, "c": 4, "x": 5}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if prepends_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<unk>", model_max_length=2
    )


def test_a_file_is_read_byte_for_byte(tmp_path):
    data = "line\r\nÆther end".encode()
    file = tmp_path / "own.txt"
    file.write_bytes(data)
    found = text.load_text(str(file))
    assert found == text.Text(data.decode(), str(file), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "cannot be read .No such file or directory.: name a text file with --text"),
        (b"", "holds no text"),
        (b" \n", "holds no text"),
        (b"caf\xe9", "is not UTF-8 text .byte 3.: convert it"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, data, sentence):
    file = tmp_path / "own.txt"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(RecipeError, match=sentence):
        text.load_text(str(file))


_LOAD = """
import json, time
from nvfp4cli.runtime.text import load_text
start = time.perf_counter()
t = load_text()
seconds = time.perf_counter() - start
print(json.dumps([t.name, t.sha256, len(t.text), seconds]))
"""


def test_without_a_hub_python_supplies_the_text(tmp_path):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    with socket.socket() as unused:  # bound but not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = subprocess.run(
            [sys.executable, "-c", _LOAD],
            env=inherited | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    name, sha256, length, seconds = json.loads(result.stdout)
    assert name.startswith(f"Python {platform.python_version()} language reference")
    assert length > 300_000
    assert seconds < 6  # the probe waits 3 s at most; the hub library's own retries take 24 s
    joined = "\n\n".join(topics[topic] for topic in sorted(topics))
    assert sha256 == hashlib.sha256(joined.encode()).hexdigest()


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(text.constants, "HF_HUB_CACHE", str(tmp_path))


def test_a_silent_hub_is_given_up(no_cache, monkeypatch):
    monkeypatch.setattr(text, "_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(text, "is_offline_mode", lambda: False)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # connects, never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(text.constants, "ENDPOINT", address)
        assert text.load_text().name.startswith("Python")


def test_offline_mode_asks_nobody(no_cache, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a request in offline mode")

    monkeypatch.setattr(text, "is_offline_mode", lambda: True)
    monkeypatch.setattr(text.urllib.request, "urlopen", refuse)
    assert text.load_text().name.startswith("Python")


def test_a_download_that_breaks_off_falls_back(no_cache, monkeypatch):
    def download(*_: object, **__: object) -> str:
        raise HTTPError("connection reset")

    monkeypatch.setattr(text, "_hub_answers", lambda: True)
    monkeypatch.setattr(text, "hf_hub_download", download)
    assert text.load_text().name.startswith("Python")


def test_the_cached_archive_needs_no_network(no_cache, tmp_path, monkeypatch):
    repository = tmp_path / "datasets--ggml-org--ci"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    with zipfile.ZipFile(snapshot / "wikitext-2-raw-v1.zip", "w") as files:
        files.writestr("wikitext-2-raw/wiki.test.raw", " = Robert = \n")
    monkeypatch.setattr(text, "is_offline_mode", lambda: True)
    found = text.load_text()
    assert found.text == " = Robert = \n"
    assert found.name == "WikiText-2 raw test"


def test_tokens_carry_no_special_ones_and_stop_at_the_limit():
    tokenizer = word_tokenizer(prepends_bos=True)
    assert text.tokenize(tokenizer, "a b c x a").tolist() == [2, 3, 4, 5, 2]
    cut = text.tokenize(tokenizer, "a b c x a", max_tokens=3)
    assert cut.tolist() == [2, 3, 4]
    assert cut.dtype == torch.int64


def test_a_bos_counts_only_if_the_tokenizer_prepends_it():
    assert text.leading_bos(word_tokenizer(prepends_bos=True)) == 0
    silent = word_tokenizer(prepends_bos=False)
    assert silent.bos_token_id == 0
    assert text.leading_bos(silent) is None


def test_no_bos_at_all():
    tokenizer = word_tokenizer(prepends_bos=False)
    tokenizer.bos_token = None
    assert text.leading_bos(tokenizer) is None
