"""What the user names as the model."""

from dataclasses import dataclass
from pathlib import Path

from nvfp4cli.checkpoint import hub, remote
from nvfp4cli.checkpoint.reader import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class Source:
    """What the user names as the model."""

    model: str
    revision: str | None
    arch_spec: Path | None

    def open(self, headers_only: bool) -> Checkpoint:
        """Read and check the headers, after downloading what is missing.

        headers_only: of a hub id, nothing but the headers of the weights is fetched.
        """
        if headers_only and remote.reachable(self.model):
            return remote.open_remote(self.model, self.revision)
        return open_checkpoint(hub.resolve(self.model, self.revision))
