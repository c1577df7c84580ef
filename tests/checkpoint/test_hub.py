"""The network parts run in a process of their own: HF_ENDPOINT and HF_HOME are read on import."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, Refusal, Repo, serve

from nvfp4cli.checkpoint import hub
from nvfp4cli.errors import CheckpointError, RecipeError

CLIENT = """
import dataclasses, json, pathlib, sys
from nvfp4cli.checkpoint import hub
from nvfp4cli.errors import Nvfp4Error

def plain(value):
    return str(value) if isinstance(value, pathlib.Path) else dataclasses.asdict(value)

for line in sys.stdin:
    function, args, options = json.loads(line)
    try:
        answer = {"value": getattr(hub, function)(*args, **options)}
    except Nvfp4Error as error:
        answer = {"error": str(error)}
    print(json.dumps(answer, default=plain), flush=True)
"""


class Client:
    """`nvfp4cli.checkpoint.hub` in another process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def resolve(self, *args: Any, **options: Any) -> Path:
        return Path(self._call("resolve", args, options))

    def remote_headers(self, *args: Any) -> dict[str, Any]:
        return self._call("remote_headers", args, {})

    def _call(self, function: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([function, args, options]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return answer["value"]


@contextmanager
def start_client(endpoint: str, home: Path, **env: str) -> Iterator[Client]:
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
        and not name.lower().endswith("_proxy")
    }
    mine |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    mine |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    command = [sys.executable, "-c", CLIENT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=mine) as process:
        yield Client(process)


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf_home")


@pytest.fixture(scope="module")
def online(server: HubServer, home: Path) -> Iterator[Client]:
    with start_client(server.url, home) as client:
        yield client


@pytest.fixture(scope="module")
def offline(server: HubServer, home: Path) -> Iterator[Client]:
    with start_client(server.url, home, HF_HUB_OFFLINE="1") as client:
        yield client


def safetensors(size: int, *names: str) -> bytes:
    """A file of U8 vectors of `size` elements, written by the format's definition."""
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size * len(names))


def index(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(shards)}}).encode()


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SIDECARS = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool[1].jinja": b"{{ tools }}",
    "modeling_mine.py": b"raise RuntimeError('remote code was run')",
    "LICENSE": b"Apache-2.0",
    "README.md": b"# A model",
}
JUNK = {
    ".gitattributes": b"*.bin filter=lfs",
    "pytorch_model.bin": b"pickle",
    "model.gguf": b"GGUF",
    "consolidated.safetensors": safetensors(4, "t0"),
    "model.fp16.safetensors": safetensors(4, "t0"),
    "model.fp16.safetensors.index.json": b"{}",
    "original/params.json": b"{}",
    "onnx/config.json": b"{}",
    "figure.png": b"PNG",
}
WEIGHTS = {
    hub.INDEX: index(*SHARDS),
    SHARDS[0]: safetensors(4, "t0"),
    SHARDS[1]: safetensors(6, "t1", "t2"),
}


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def downloaded(server: HubServer) -> list[str]:
    return sorted(request.path for request in server.take_log() if request.kind == "file")


def test_download_holds_what_the_checkpoint_needs_and_nothing_else(
    server: HubServer, online: Client, offline: Client
) -> None:
    wanted = SIDECARS | WEIGHTS
    single = {"model.safetensors": safetensors(4, "t0")}  # a duplicate of what the index names
    server.repos["org/sharded"] = Repo({"main": wanted | JUNK | single})
    server.take_log()
    folder = online.resolve("org/sharded")
    assert contents(folder) == wanted
    assert downloaded(server) == sorted(wanted)

    assert online.resolve("org/sharded") == folder
    assert downloaded(server) == []

    assert offline.resolve("org/sharded") == folder
    assert server.take_log() == []


def test_single_file_and_sidecars_alone(server: HubServer, online: Client, offline: Client) -> None:
    weights = {"model.safetensors": safetensors(4, "t0")}
    server.repos["org/single"] = Repo({"main": SIDECARS | JUNK | weights})
    assert contents(online.resolve("org/single", weights=False)) == SIDECARS
    with pytest.raises(CheckpointError, match=r"not wholly, in the cache .* unset it to download"):
        offline.resolve("org/single")
    assert contents(offline.resolve("org/single", weights=False)) == SIDECARS
    assert contents(online.resolve("org/single")) == SIDECARS | weights


def test_each_revision_has_its_own_content(
    server: HubServer, online: Client, offline: Client
) -> None:
    weights = {"model.safetensors": safetensors(4, "t0")}
    main = weights | {"config.json": b'{"version": 1}'}
    v2 = weights | {"config.json": b'{"version": 2}'}
    repo = server.repos["org/versions"] = Repo({"main": main, "v2": v2})
    found = repo.find("v2")
    assert found is not None
    commit, _ = found
    assert contents(online.resolve("org/versions")) == main
    assert contents(online.resolve("org/versions", "v2")) == v2
    assert online.resolve("org/versions", commit) == online.resolve("org/versions", "v2")
    assert contents(offline.resolve("org/versions", "v2")) == v2
    assert contents(offline.resolve("org/versions")) == main
    with pytest.raises(CheckpointError, match="org/versions has no revision v3: choose"):
        online.resolve("org/versions", "v3")


def test_offline_without_a_cache(offline: Client) -> None:
    with pytest.raises(
        CheckpointError, match=r"org/never at revision v1 is no folder, .* unset it"
    ):
        offline.resolve("org/never", "v1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set: unset it"):
        offline.remote_headers("org/never")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"pytorch_model.bin": b"pickle"}, r'from_pretrained\("org/bad"\)\.save_pretrained'),
        ({"model.gguf": b"GGUF"}, "only model.gguf: give a checkpoint saved by transformers"),
        ({"consolidated.safetensors": b""}, "only consolidated.safetensors"),
        ({}, "no weights at all"),
        ({hub.INDEX: index(*SHARDS), SHARDS[1]: b""}, f"lacks 1 of the 2 .*first is {SHARDS[0]}"),
        ({hub.INDEX: b"[]"}, "no readable weight_map"),
        ({hub.INDEX: b'{"weight_map": {}}'}, "names no files"),
    ],
)
def test_weights_that_cannot_be_used_are_refused_before_any_download(
    server: HubServer, online: Client, tmp_path: Path, files: dict[str, bytes], sentence: str
) -> None:
    checkpoint = {"config.json": repr(files).encode(), **files}
    server.repos["org/bad"] = Repo({"main": checkpoint})
    server.take_log()
    with pytest.raises(CheckpointError, match=sentence):
        online.resolve("org/bad")
    assert set(downloaded(server)) <= {hub.INDEX}

    for name, content in checkpoint.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=sentence.replace("org/bad", str(tmp_path))):
        hub.resolve(str(tmp_path))
    assert hub.resolve(str(tmp_path), weights=False) == tmp_path


@pytest.mark.parametrize(
    ("refuse", "sentence"),
    [
        ({"file": Refusal(401, "GatedRepo")}, "is gated: accept its licence at .*hf auth login"),
        ({"file": Refusal(403, "GatedRepo")}, "is gated: accept its licence at .*hf auth login"),
        ({"info": Refusal(401, "RepoNotFound")}, "nor a public model .*run `hf auth login`"),
        ({"info": Refusal(401)}, "HTTP status 401: run `hf auth login`"),
        ({"info": Refusal(404, "RepoNotFound")}, "neither a folder nor a public model"),
        ({"info": Refusal(403)}, "HTTP status 403: run `hf auth login`"),
        ({"model.safetensors": Refusal(403)}, "HTTP status 403: run `hf auth login`"),
        ({"info": Refusal(500)}, "HTTP status 500: try again later"),
    ],
)
def test_refusals_of_the_hub(
    server: HubServer, online: Client, refuse: dict[str, Refusal], sentence: str
) -> None:
    files = {"config.json": b"{}", "model.safetensors": safetensors(4, "t0")}
    server.repos["org/refused"] = Repo({"main": files}, refuse)
    for call in (online.resolve, online.remote_headers):
        with pytest.raises(CheckpointError, match=sentence):
            call("org/refused")


def test_repository_without_config(server: HubServer, online: Client) -> None:
    server.repos["org/plain"] = Repo({"main": {"model.safetensors": safetensors(4, "t0")}})
    with pytest.raises(CheckpointError, match=r"org/plain has no config\.json: give"):
        online.resolve("org/plain")


def test_download_that_breaks_off_is_not_taken_for_complete(
    server: HubServer, online: Client
) -> None:
    """Versions of huggingface_hub ask for the tree or not; where it is refused, what is cached is
    returned as if it were all, and where it is not asked for, the file itself is refused."""
    files = {"config.json": b'{"broken": 1}', "model.safetensors": safetensors(4, "t0")}
    refuse = {"tree": Refusal(418), "model.safetensors": Refusal(418)}
    server.repos["org/broken"] = Repo({"main": files}, refuse)
    with pytest.raises(CheckpointError, match=r"1 of 2 files missing: run|HTTP status 418: try"):
        online.resolve("org/broken")


def test_server_that_is_down(tmp_path: Path) -> None:
    with serve() as gone:
        url = gone.url
    with start_client(url, tmp_path) as client:
        for call in (client.resolve, client.remote_headers):
            with pytest.raises(CheckpointError, match=r"no folder.* reached \(.*refused\): check"):
                call("org/name")


def test_cache_that_cannot_be_written(server: HubServer, tmp_path: Path) -> None:
    server.repos["org/good"] = Repo({"main": SIDECARS | WEIGHTS})
    (tmp_path / "occupied").write_bytes(b"")
    sentence = r"org/good cannot be stored in .*HF_HOME"
    with (
        start_client(server.url, tmp_path / "occupied") as client,
        pytest.raises(CheckpointError, match=sentence),
    ):
        client.resolve("org/good")


def test_remote_headers_without_the_weights(server: HubServer, online: Client) -> None:
    size = 1_000_000
    large = {SHARDS[0]: safetensors(size, "t0", "t1"), SHARDS[1]: safetensors(4, "t2")}
    files = {"config.json": b'{"large": 1}', hub.INDEX: index(*SHARDS), **large}
    server.repos["org/large"] = Repo({"main": files | {"model.safetensors": b"old"}})
    server.take_log()
    assert online.remote_headers("org/large") == {
        SHARDS[0]: {
            "size": len(large[SHARDS[0]]),
            "tensors": {"t0": ["U8", [size], [0, size]], "t1": ["U8", [size], [size, 2 * size]]},
        },
        SHARDS[1]: {"size": len(large[SHARDS[1]]), "tensors": {"t2": ["U8", [4], [0, 4]]}},
    }
    sent = {request.path: request.sent for request in server.take_log() if request.kind == "file"}
    assert set(sent) == {hub.INDEX, *SHARDS}
    assert sent[SHARDS[0]] == 100_001  # the range 0-100000


def test_remote_header_that_is_damaged(server: HubServer, online: Client) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"<html>not a model</html>"}
    server.repos["org/damaged"] = Repo({"main": files})
    with pytest.raises(CheckpointError, match="org/damaged holds a damaged safetensors file"):
        online.remote_headers("org/damaged")


def test_local_folder_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    for name, content in {"config.json": b"{}", **WEIGHTS, **JUNK}.items():
        if "/" not in name:
            (folder / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name") == Path("org/name")
    assert hub.weight_files(folder) == list(SHARDS)
    with pytest.raises(RecipeError, match="has no revision main: drop --revision"):
        hub.resolve("org/name", "main")

    (folder / "part").mkdir()
    (folder / SHARDS[1]).rename(folder / "part" / SHARDS[1])
    (folder / hub.INDEX).write_bytes(index(SHARDS[0], f"part/{SHARDS[1]}"))
    assert hub.weight_files(folder) == [SHARDS[0], f"part/{SHARDS[1]}"]
    (folder / hub.INDEX).write_bytes(index(*SHARDS))
    (folder / SHARDS[1]).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=f"lacks 1 of the 2 .*{SHARDS[1]}"):
        hub.resolve(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        hub.resolve(str(folder))
    with pytest.raises(CheckpointError, match="is a file: give the folder"):
        hub.resolve(str(folder / SHARDS[0]))


@pytest.mark.parametrize("model", ["./gone", "../gone", "/gone/model", "~/gone", "a/b/c", "gone/"])
def test_path_that_does_not_exist(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not hub.is_hub_id(model)
    with pytest.raises(CheckpointError, match=f"no such folder as {model}: check the path"):
        hub.resolve(model)


def test_hub_id_unless_the_path_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for model in ("gpt2", "Qwen/Qwen3-0.6B", "org/with_under.score"):
        assert hub.is_hub_id(model)
        Path(model).mkdir(parents=True)
        assert not hub.is_hub_id(model)


@pytest.mark.parametrize("name", [*SIDECARS, "tokenizer.model", "LICENSE-CODE", "Notice.pdf"])
def test_wanted(name: str) -> None:
    assert hub.is_wanted(name)


@pytest.mark.parametrize(
    "name", [*JUNK, *WEIGHTS, "model.safetensors", "pytorch_model.bin.index.json"]
)
def test_not_wanted(name: str) -> None:
    assert not hub.is_wanted(name)


@pytest.mark.parametrize("model", ["", " "])
def test_an_empty_name_is_not_the_working_folder(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"name is empty: give a folder, or a hub id"):
        hub.resolve(model)


@pytest.mark.parametrize("model", ["x" * 300, "~no-such-user/model"])
def test_a_name_that_can_be_no_path(model: str) -> None:
    with pytest.raises(CheckpointError, match=r" is no path \(.*\): check it\.$"):
        hub.resolve(model)
