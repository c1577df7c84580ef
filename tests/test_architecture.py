"""Which room may import which, what stays in its room, and how large a file or function may be.

Imports inside functions count too: a lazy import is still an arrow.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nvfp4cli"
MODULES = sorted(PACKAGE.rglob("*.py"))

ANYONE = {"errors", "version"}  # "version": the package itself, `from nvfp4cli import __version__`
ARROWS: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "recipe": set(),
    "formats": set(),
    "models": set(),
    "checkpoint": set(),
    "kernels": {"formats"},
    "rotate": {"models"},
    "layouts": {"formats", "checkpoint"},
    "plan": {"recipe", "models", "rotate", "checkpoint", "layouts", "formats"},
    "describe": {"formats", "kernels", "rotate", "models", "checkpoint", "layouts"},
    "runtime": {"formats", "kernels", "methods", "models", "checkpoint", "layouts"},
    "calibrate": {"methods", "formats", "kernels", "models", "checkpoint", "layouts", "runtime"},
    "evaluate": {"checkpoint", "layouts", "runtime"},
    "methods": {"formats", "kernels"},
    "pipeline": {
        "methods",
        "plan",
        "kernels",
        "formats",
        "rotate",
        "models",
        "checkpoint",
        "layouts",
        "runtime",
        "calibrate",
        "recipe",
    },
    "study": {"methods", "formats", "rotate", "models", "checkpoint", "layouts"},
    "check": {"recipe", "checkpoint", "plan", "pipeline"},
}
ARROWS["cli"] = set(ARROWS)

# Other people's packages that one part of the tree only may import.
PLACES = {
    "triton": ("kernels/",),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "transformers": ("runtime/", "evaluate/", "check/"),
    "matplotlib": ("study/plot.py",),
    "huggingface_hub": ("checkpoint/hub.py", "checkpoint/remote.py", "runtime/text.py"),
}
WITHOUT_TORCH = ("errors.py", "recipe.py", "cli/app.py", "cli/commands.py", "cli/console.py",
                 "cli/interrupts.py", "cli/options.py", "cli/streams.py", "checkpoint/files.py",
                 "checkpoint/hub.py")  # fmt: skip

FILE_LINES = 400
FUNCTION_LINES = 60
KERNEL_LINES = 120
FOLDERS_OF_NO_NAME = {"utils", "util", "helpers", "helper", "common", "misc"}


@pytest.fixture(params=MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def module(request: pytest.FixtureRequest) -> Path:
    return request.param


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "version" if first == "__init__.py" else first.removesuffix(".py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names of what a file imports, `from a import b` as a.b, with the line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path)}:{node.lineno} is a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("__import__", "import_module"):
            pytest.fail(f"{place(path)}:{node.lineno} imports by a name that cannot be checked")


def called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imports(path):
        package, *rest = name.split(".")
        if package == "nvfp4cli":
            yield (rest[0] if rest and rest[0] in ARROWS else "version"), line


def test_every_room_is_in_the_picture() -> None:
    assert {room(path) for path in MODULES} == set(ARROWS)


def test_imports_are_seen_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import torch\n"
        "from nvfp4cli import __version__, plan\n"
        "if TYPE_CHECKING:\n    import nvfp4cli.cli.app\n"
        "def f():\n    from nvfp4cli.kernels.quantize_cpu import quantize_cpu\n"
    )
    assert list(imported_rooms(file)) == [("version", 2), ("plan", 2), ("cli", 4), ("kernels", 6)]
    assert ("torch", 1) in list(imports(file))


def test_the_arrows_have_no_cycle() -> None:
    left = {name: targets - {name} for name, targets in ARROWS.items()}
    while left:
        leaves = [name for name, targets in left.items() if not targets & set(left)]
        assert leaves, f"a cycle among {sorted(left)}"
        for name in leaves:
            del left[name]


def test_imports_follow_the_arrows(module: Path) -> None:
    allowed = ARROWS[room(module)] | ANYONE | {room(module)}
    wrong = [
        f"{place(module)}:{line}: {room(module)} -> {target}"
        for target, line in imported_rooms(module)
        if target not in allowed
    ]
    assert not wrong


def test_packages_stay_in_their_places(module: Path) -> None:
    wrong = [
        f"{place(module)}:{line}: {name}"
        for name, line in imports(module)
        if not place(module).startswith(PLACES.get(name.split(".")[0], ("",)))
    ]
    assert not wrong


def test_only_the_command_line_prints_and_exits(module: Path) -> None:
    if room(module) == "cli":
        return
    wrong = []
    for node in ast.walk(tree(module)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Name) and node.id == "SystemExit":
            name = node.id
        if name in ("print", "exit", "quit", "sys.exit", "os._exit", "SystemExit"):
            wrong.append(f"{place(module)}:{node.lineno}: {name}")
        if name.startswith(("sys.stdout", "sys.stderr")):
            wrong.append(f"{place(module)}:{node.lineno}: {name}")
    assert not wrong


def test_sizes(module: Path) -> None:
    lines = len(module.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES, f"{place(module)} has {lines} lines"
    limit = KERNEL_LINES if room(module) == "kernels" else FUNCTION_LINES
    long = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > limit:
                long.append(f"{place(module)}:{node.lineno}: {node.name} has {length} lines")
    assert not long


def test_names_say_what_is_inside(module: Path) -> None:
    assert not FOLDERS_OF_NO_NAME & {*module.relative_to(PACKAGE).parts[:-1], module.stem}


def fresh_python(code: str) -> str:
    """What `code` prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", WITHOUT_TORCH)
def test_imports_no_torch(path: str) -> None:
    name = "nvfp4cli." + path.removesuffix(".py").replace("/", ".")
    code = f"import sys, {name}\nprint([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert fresh_python(code).strip() == "[]"


def test_help_and_recipes_need_no_torch() -> None:
    code = """
import sys
from nvfp4cli import recipe
from nvfp4cli.cli.app import main
codes = [main(["--help"]), main(["quantize", "--help"]), main(["--version"])]
recipe.load("vllm")
assert codes == [0, 0, 0], codes
assert "torch" not in sys.modules
"""
    assert "Usage: nvfp4" in fresh_python(code)
