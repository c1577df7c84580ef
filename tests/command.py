"""What tests of whole runs share."""

from pathlib import Path

from nvfp4cli.cli.app import main


def quantize(model: Path, out: Path, *options: str) -> int:
    """Exit code of `nvfp4 quantize` on the CPU."""
    return main(["quantize", str(model), str(out), "--device", "cpu", *options])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its relative name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
