"""The folder a run writes: claimed, locked, resumable, removed where nothing may be left."""

import fcntl
import json
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

from nvfp4cli.checkpoint.files import CONFIG, RECORD
from nvfp4cli.checkpoint.writer import PARTIAL
from nvfp4cli.errors import CheckpointError

# Present only while a run is unfinished. Holds what must be the same for a resume.
JOURNAL = ".nvfp4-run.json"


class OutputFolder:
    """Context manager around a run's output.

    Entering creates and locks the folder or raises CheckpointError, with no trace left, when it
    holds anything but an unfinished run with the same fingerprint.
    """

    def __init__(self, path: Path, source: Path, fingerprint: dict[str, Any], resume: bool) -> None:
        """fingerprint: JSON values under names that complete "The ... changed"."""
        self._path = path
        self._source = source
        self._fingerprint = fingerprint
        self._resume = resume
        self._made = 0  # how many of the path and its parents did not exist before the run
        self._lock = -1

    def __enter__(self) -> "OutputFolder":
        self._check_apart()
        try:
            self._claim()
        except OSError as error:
            raise CheckpointError(
                f"{self._path} cannot be written ({error.strerror}): choose another output folder."
            ) from None
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

    def discard(self, files: Iterable[str]) -> None:
        """Remove `files`, whole or partial, that this run and those it resumed have written.

        What somebody else has put into the folder stays. Folders go too where they were made for
        the run and are empty.
        """
        for name in (*files, JOURNAL):
            path = self._path / name
            path.unlink(missing_ok=True)
            path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
            for parent in path.relative_to(self._path).parents[:-1]:
                with suppress(OSError):
                    (self._path / parent).rmdir()
        self._remove_made()

    def _claim(self) -> None:
        """Create folder and journal and lock the journal; undo all of it if anything fails."""
        with ExitStack() as undo:
            missing = list(takewhile(lambda folder: not folder.exists(), self._lineage()))
            undo.callback(self._remove_made)
            self._made = len(missing)
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
            resuming = self._check_content()
            journal = self._path / JOURNAL
            self._lock = self._open_journal(
                os.O_RDWR if resuming else os.O_CREAT | os.O_EXCL | os.O_RDWR
            )
            undo.callback(os.close, self._lock)
            if not resuming:
                undo.callback(journal.unlink)
            self._take_lock()
            if not resuming:
                record = {"fingerprint": self._fingerprint, "made": self._made}
                journal.write_text(json.dumps(record), encoding="utf-8")
                os.fsync(self._lock)
            undo.pop_all()

    def _open_journal(self, flags: int) -> int:
        try:
            return os.open(self._path / JOURNAL, flags, 0o644)
        except FileExistsError:  # made since we looked
            raise self._busy() from None

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._busy() from None

    def _busy(self) -> CheckpointError:
        return CheckpointError(
            f"Another run is writing to {self._path}: wait for it, or choose another folder."
        )

    def _lineage(self) -> list[Path]:
        """The folder, its parent, and so on up to the root."""
        path = self._path.absolute()
        return [path, *path.parents]

    def _remove_made(self) -> None:
        """Remove the folders made for the run, as far up as they are empty."""
        for folder in self._lineage()[: self._made]:
            with suppress(OSError):
                folder.rmdir()

    def _check_apart(self) -> None:
        out, source = self._path.resolve(), self._source.resolve()
        if out == source or source in out.parents or out in source.parents:
            raise CheckpointError(
                f"{self._path} is the source folder, inside it or around it: choose an output "
                "folder beside it."
            )

    def _check_content(self) -> bool:
        """True where the folder holds a run to resume, False where it is empty."""
        entries = [entry.name for entry in self._path.iterdir()]
        if JOURNAL in entries:
            self._check_resumable()
            return True
        if self._resume and {CONFIG, RECORD} <= set(entries):
            raise CheckpointError(
                f"{self._path} holds a finished checkpoint: there is nothing to resume; leave it, "
                "or choose another output folder."
            )
        if entries:
            raise CheckpointError(
                f"{self._path} is not empty: choose another output folder, or empty this one "
                "yourself."
            )
        return False

    def _check_resumable(self) -> None:
        if not self._resume:
            raise CheckpointError(
                f"{self._path} holds an unfinished run: add --resume to continue it, or delete the "
                "folder."
            )
        try:
            record = json.loads((self._path / JOURNAL).read_text(encoding="utf-8"))
            earlier, made = dict(record["fingerprint"]), int(record["made"])
        except (ValueError, TypeError, KeyError):
            raise CheckpointError(
                f"{self._path / JOURNAL} is damaged: delete the folder and start again."
            ) from None
        changed = [key for key, value in self._fingerprint.items() if earlier.get(key) != value]
        if changed:
            raise CheckpointError(
                f"The {' and the '.join(changed)} changed since the run in {self._path} began: run "
                "it as before, or delete the folder and start again."
            )
        self._made = made
