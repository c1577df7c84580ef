"""From what the user calls a model, a folder or a Hugging Face hub id, to files on disk.

`huggingface_hub` does all network work, caching and tokens. This module decides which files a
checkpoint consists of and turns what goes wrong into sentences. Remote code is only a file here:
it is downloaded and never imported.

Works with huggingface_hub 1.x and 2.x.
"""

import glob
import json
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of httpx in 1.x and of httpx2 in 2.x: the base of their connection errors
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import validate_repo_id

from nvfp4cli.checkpoint.files import CONFIG, INDEX, SINGLE, no_weights
from nvfp4cli.errors import CheckpointError, RecipeError

_SIDECAR_SUFFIXES = frozenset(
    (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".spm", ".py", ".md")
)
_LEGAL_PREFIXES = ("license", "licence", "notice", "copying")  # often without a suffix
_HEADER_THREADS = 8  # a header is one round trip, and large models have over a hundred files


class TensorHeader(NamedTuple):
    """What a safetensors header says of one tensor.

    dtype: safetensors' name, such as BF16 or F8_E4M3. offsets: first byte and one past the last,
    counted from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]


@dataclass(frozen=True)
class RemoteFile:
    """One safetensors file on the hub. size: bytes, None where the server does not tell."""

    size: int | None
    tensors: dict[str, TensorHeader]


def is_hub_id(model: str) -> bool:
    """True if `model` can be the name of a hub repository and no such path exists.

    Raises CheckpointError for what the operating system does not take for a path.
    """
    if _path(model).exists():
        return False
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def is_wanted(name: str) -> bool:
    """Whether a file of a repository is downloaded whichever weights are.

    Configurations, tokenizer, chat templates, remote code, licence and model card: all small.
    name: a path relative to the repository, with slashes.
    """
    folder, _, file = name.rpartition("/")
    if folder:
        return folder == "additional_chat_templates" and file.endswith(".jinja")
    if file.endswith(".index.json"):  # of weights in some format
        return False
    return PurePosixPath(file).suffix in _SIDECAR_SUFFIXES or (
        file.lower().startswith(_LEGAL_PREFIXES)
    )


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that a local checkpoint consists of, sorted.

    With model.safetensors.index.json the shards it names, otherwise model.safetensors. Raises
    CheckpointError where they are missing or the weights have another format.
    """
    return _weight_files(str(folder), _file_names(folder), lambda name: folder / name)


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of a checkpoint, downloaded first if `model` is a hub id.

    model: a folder, which wins where it exists, or a hub id. revision: branch, tag or commit of
    the hub repository; None is its main branch. weights: False leaves the safetensors files out.

    A folder is returned as it is. A download holds config.json, the sidecars and the files that
    `weight_files` names, nothing else; the folder lies in the cache of huggingface_hub, is shared
    with other programs and must not be written to. With HF_HUB_OFFLINE=1 the cache alone is used,
    where config.json and weights are checked and other sidecars are taken as they are.

    Raises CheckpointError, and RecipeError for a revision of a folder.
    """
    if not model.strip():
        raise CheckpointError(
            "The model's name is empty: give a folder, or a hub id like org/name."
        )
    if not is_hub_id(model):
        return _local_folder(model, revision, weights)
    if constants.HF_HUB_OFFLINE:
        return _cached_folder(model, revision, weights)
    return _download(model, revision, weights)


def remote_headers(model: str, revision: str | None = None) -> dict[str, RemoteFile]:
    """The headers of the safetensors files of a hub id, {file name: header}, without the weights.

    One range request of 100 kB for each file, two where the header is longer. Raises
    CheckpointError as `resolve` does, and in offline mode, where headers cannot be asked for.
    """
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"The tensor headers of {model} are read over the network, and HF_HUB_OFFLINE is set: "
            "unset it, or give a folder."
        )
    with _hub_errors(model, revision):
        listing = _list(model, revision)
        names = _remote_weight_files(model, listing)

        def header(name: str) -> dict[str, TensorHeader]:
            found = HfApi().parse_safetensors_file_metadata(model, name, revision=listing.commit)
            return {
                tensor: TensorHeader(info.dtype, tuple(info.shape), info.data_offsets)
                for tensor, info in found.tensors.items()
            }

        with ThreadPoolExecutor(_HEADER_THREADS) as pool:
            headers = list(pool.map(header, names))
    return {
        name: RemoteFile(listing.sizes[name], tensors)
        for name, tensors in zip(names, headers, strict=True)
    }


def _path(model: str) -> Path:
    try:
        path = Path(model).expanduser()
        path.exists()  # a name can be too long to be asked for
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise CheckpointError(f"{model} is no path ({reason}): check it.") from None
    return path


def _local_folder(model: str, revision: str | None, weights: bool) -> Path:
    folder = _path(model)
    if not folder.exists():
        raise CheckpointError(
            f"There is no such folder as {model}: check the path, or give a hub id like org/name."
        )
    if not folder.is_dir():
        raise CheckpointError(f"{model} is a file: give the folder that holds the checkpoint.")
    if revision is not None:
        raise RecipeError(f"{model} is a folder and has no revision {revision}: drop --revision.")
    _check_config(model, (folder / CONFIG).is_file())
    if weights:
        weight_files(folder)
    return folder


def _cached_folder(model: str, revision: str | None, weights: bool) -> Path:
    try:
        found = snapshot_download(
            model, revision=revision, local_files_only=True, allow_patterns=[CONFIG]
        )
        return _local_folder(found, None, weights)
    except (LocalEntryNotFoundError, CheckpointError) as error:
        raise CheckpointError(
            f"{_at(model, revision)} is no folder, and it is not, or not wholly, in the cache "
            f"{constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: check the name, or unset it to "
            "download the model."
        ) from error


def _download(model: str, revision: str | None, weights: bool) -> Path:
    with _hub_errors(model, revision):
        listing = _list(model, revision)
        wanted = [name for name in listing.sizes if is_wanted(name)]
        if weights:
            wanted += _remote_weight_files(model, listing)
        # This call records which commit the branch is at. A snapshot of a commit does not, and
        # offline mode would then not find it by the name of the branch.
        hf_hub_download(model, CONFIG, revision=revision)
        snapshot = snapshot_download(
            model, revision=listing.commit, allow_patterns=[glob.escape(name) for name in wanted]
        )
    folder = Path(snapshot)
    # When the connection fails, snapshot_download returns what an earlier call has left.
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"The download of {model} broke off with {len(missing)} of {len(wanted)} files "
            "missing: run the command again, it goes on from there."
        )
    return folder


@dataclass(frozen=True)
class _Listing:
    """The files of a repository at one commit. sizes: {name: bytes, None if not told}."""

    commit: str
    sizes: dict[str, int | None]


def _list(model: str, revision: str | None) -> _Listing:
    info = HfApi().model_info(
        model, revision=revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    )
    if info.sha is None or info.siblings is None:
        raise CheckpointError(
            f"{constants.ENDPOINT} does not list the files of {model}: check HF_ENDPOINT."
        )
    sizes = {file.rfilename: file.size for file in info.siblings}
    _check_config(model, CONFIG in sizes)
    return _Listing(info.sha, sizes)


def _remote_weight_files(model: str, listing: _Listing) -> list[str]:
    def locate(name: str) -> Path:
        return Path(hf_hub_download(model, name, revision=listing.commit))

    return _weight_files(model, listing.sizes, locate)


def _file_names(folder: Path) -> list[str]:
    """Relative, with slashes. An entry of the cache can be a link to a file that is gone."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _check_config(model: str, found: bool) -> None:
    if not found:
        raise CheckpointError(
            f"{model} has no {CONFIG}: give a Hugging Face checkpoint of a language model."
        )


def _weight_files(model: str, names: Collection[str], locate: Callable[[str], Path]) -> list[str]:
    """See `weight_files`. locate: gives the path of a named file, downloading it if need be."""
    if INDEX in names:
        shards = _shards(model, locate(INDEX))
        missing = [shard for shard in shards if shard not in names]
        if missing:
            raise CheckpointError(
                f"{model} lacks {len(missing)} of the {len(shards)} files that its {INDEX} names, "
                f"the first is {missing[0]}: complete the checkpoint."
            )
        return shards
    if SINGLE in names:
        return [SINGLE]
    raise CheckpointError(no_weights(model, names))


def _shards(model: str, index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The {INDEX} of {model} has no readable weight_map: download or save it again."
        ) from error
    if not shards:
        raise CheckpointError(f"The {INDEX} of {model} names no files: download or save it again.")
    return shards


def _at(model: str, revision: str | None) -> str:
    return model if revision is None else f"{model} at revision {revision}"


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises for the user's or the network's sake into one sentence."""
    try:
        yield
    except (HTTPError, SafetensorsParsingError, OSError) as error:
        # For one file, the hub's answer is wrapped: the file is not in the cache either.
        wrapped = isinstance(error, LocalEntryNotFoundError) and error.__cause__
        raise CheckpointError(_sentence(wrapped or error, model, revision)) from error


def _sentence(error: BaseException, model: str, revision: str | None) -> str:
    """What went wrong and what to do; subclasses are asked for before their bases."""
    hub = constants.ENDPOINT
    reason = str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, GatedRepoError):
        return f"{model} is gated: accept its licence at {hub}/{model}, then `hf auth login`."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{model} is neither a folder nor a public model on {hub}: check the name, or, "
            "if the model is private, run `hf auth login`."
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{model} has no revision {revision}: choose a branch, tag or commit listed at "
            f"{hub}/{model}/tree/main, or drop --revision."
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        refused = status in (401, 403)
        step = "run `hf auth login` with a token that may read it" if refused else "try again later"
        return f"{hub} refuses {_at(model, revision)} with HTTP status {status}: {step}."
    if isinstance(error, HTTPError | LocalEntryNotFoundError | FileMetadataError):
        return (
            f"{model} is no folder, and {hub} cannot be reached ({reason}): check the name and the "
            "connection, or set HF_HUB_OFFLINE=1 to use what is cached."
        )
    if isinstance(error, SafetensorsParsingError):
        return f"{model} holds a damaged safetensors file ({reason}): choose another revision."
    return (
        f"{model} cannot be stored in {constants.HF_HUB_CACHE} ({reason}): check the space and "
        "the permissions there, or set HF_HOME to another folder."
    )
