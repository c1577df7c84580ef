"""The folder a run writes: claimed, locked, resumable, removed where nothing may be left."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from nvfp4cli.errors import CheckpointError

# Present only while a run is unfinished. Holds what must be the same for a resume.
JOURNAL = ".nvfp4-run.json"


class OutputFolder:
    """Context manager around a run's output.

    Entering creates and locks the folder or raises CheckpointError, with no trace left, when it
    holds anything but an unfinished run with the same fingerprint.
    """

    def __init__(self, path: Path, source: Path, fingerprint: dict[str, Any], resume: bool) -> None:
        self._path = path
        self._source = source
        self._fingerprint = fingerprint
        self._resume = resume
        self._made = False
        self._lock = -1

    def __enter__(self) -> "OutputFolder":
        self._check_apart()
        try:
            self._made = not self._path.exists()
            self._path.mkdir(parents=True, exist_ok=True)
            self._check_content()
            self._lock = os.open(self._path / JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be written ({error.strerror}): choose another output folder."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CheckpointError(
                f"Another run is writing to {self._path}: wait for it, or choose another folder."
            ) from None
        os.pwrite(self._lock, json.dumps(self._fingerprint).encode(), 0)
        os.fsync(self._lock)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._lock)

    def finish(self) -> None:
        """The run is complete: the folder is no longer resumable."""
        (self._path / JOURNAL).unlink()

    def discard(self) -> None:
        """Remove everything this run and those it resumed have written."""
        for entry in self._path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        if self._made:
            self._path.rmdir()

    def _check_apart(self) -> None:
        out, source = self._path.resolve(), self._source.resolve()
        if out == source or source in out.parents or out in source.parents:
            raise CheckpointError(
                f"{self._path} is the source folder, inside it or around it: choose an output "
                "folder beside it."
            )

    def _check_content(self) -> None:
        entries = [entry.name for entry in self._path.iterdir()]
        if JOURNAL in entries:
            self._check_resumable()
        elif entries:
            raise CheckpointError(
                f"{self._path} is not empty: choose another output folder, or empty this one "
                "yourself."
            )

    def _check_resumable(self) -> None:
        if not self._resume:
            raise CheckpointError(
                f"{self._path} holds an unfinished run: add --resume to continue it, or delete the "
                "folder."
            )
        try:
            earlier = json.loads((self._path / JOURNAL).read_text(encoding="utf-8"))
        except ValueError:
            raise CheckpointError(
                f"{self._path / JOURNAL} is damaged: delete the folder and start again."
            ) from None
        changed = [key for key, value in self._fingerprint.items() if earlier.get(key) != value]
        if changed:
            raise CheckpointError(
                f"The {' and the '.join(changed)} changed since the run in {self._path} began: run "
                "it as before, or delete the folder and start again."
            )
