"""Recipes: strict about keys and values, the same whether from a file, by name or from options."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvfp4cli import recipe
from nvfp4cli.errors import RecipeError, UsageError
from nvfp4cli.recipe import Recipe, load


def written(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_key_can_be_written(tmp_path: Path) -> None:
    text = """
        scheme: none
        layout: modelopt
        rotate: r1r2
        rotation_kind: block-64
        seed: 7
        ignore: ["*.down_proj", "re:.*gate"]
        include: [lm_head]
        dtype: float32
        max_shard_size: 1.5 GB
    """
    expected = Recipe(
        scheme="none",
        layout="modelopt",
        rotate="r1r2",
        rotation_kind="block-64",
        seed=7,
        ignore=("*.down_proj", "re:.*gate"),
        include=("lm_head",),
        dtype="float32",
        max_shard_size="1.5 GB",
    )
    assert load(written(tmp_path, text)) == expected
    assert load(written(tmp_path, yaml.safe_dump(expected.to_dict()))) == expected


@pytest.mark.parametrize("text", ["", "# nothing chosen\n", "{}"])
def test_what_is_not_written_is_the_default(tmp_path: Path, text: str) -> None:
    assert load(written(tmp_path, text)) == Recipe()


def test_the_record_of_an_output_is_a_recipe(tmp_path: Path) -> None:
    wish = Recipe(layout="comfy", ignore=("a",))
    record = {"nvfp4_version": "0.1.0", "model": "org/name", "recipe": wish.to_dict()}
    assert load(written(tmp_path, yaml.safe_dump(record))) == wish
    with pytest.raises(RecipeError, match="is no recipe: write lines such as"):
        load(written(tmp_path, "nvfp4_version: 0.1.0"))
    record["recipe"]["speed"] = "fast"
    with pytest.raises(RecipeError, match="unknown key 'speed'"):
        load(written(tmp_path, yaml.safe_dump(record)))


SHIPPED = Path(__file__).parents[1] / "configs"


def test_shipped_recipes_are_known() -> None:
    assert recipe.recipes_folder() == SHIPPED
    assert recipe.known() == sorted(path.stem for path in SHIPPED.iterdir())
    assert len(recipe.known()) >= 5


@pytest.mark.parametrize("name", [path.stem for path in sorted(SHIPPED.iterdir())])
def test_shipped_recipe_loads_by_name_and_path(name: str) -> None:
    found = load(name)
    document = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"))
    assert found == load(str(SHIPPED / f"{name}.yaml")) == Recipe(**document)


def test_a_file_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("vllm").layout == "compressed-tensors"
    Path("vllm").mkdir()
    assert load("vllm").layout == "compressed-tensors"
    Path("vllm").rmdir()
    Path("vllm").write_text("layout: modelopt")
    assert load("vllm").layout == "modelopt"


def test_no_such_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"No recipe file 'gone': give the path.*weight-only"):
        load("gone")
    with pytest.raises(RecipeError, match=r"No recipe file 'vlm' \(did you mean vllm\?\): give"):
        load("vlm")
    with pytest.raises(RecipeError, match="No recipe file '': give the path"):
        load("")
    with pytest.raises(RecipeError, match="is a folder: name the recipe file in it"):
        load(str(tmp_path))
    with pytest.raises(RecipeError, match=r"cannot be read \(File name too long\): give the path"):
        load("x" * 300)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path, "seed: 1")
    monkeypatch.setattr(Path, "read_text", refused)  # root may read everything
    with pytest.raises(RecipeError, match=r"cannot be read \(Permission denied\): name another"):
        load(path)


def test_a_pipe_is_a_file(tmp_path: Path) -> None:
    """As shells make of `--recipe <(...)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("layout: comfy",))
    writer.start()
    assert load(str(pipe)).layout == "comfy"
    writer.join()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "layouts: modelopt",
            r"unknown key 'layouts' \(did you mean layout\?\): the keys are bits, ",
        ),
        (
            "turbo: 1",
            "unknown key 'turbo': the keys are bits, channel_scales, dtype, ignore",
        ),
        ("1: 2", "unknown key 1: "),
        ("null: 2", "unknown key None"),
        ("- torchao", "is no recipe: write lines such as `layout: torchao`"),
        ("[]", "is no recipe"),
        ("false", "is no recipe"),
        ("torchao", "is no recipe"),
        ("layout: [", r"is not a readable YAML file \(.*\): correct it"),
        ("a: b: c", "is not a readable YAML file"),
        ("layout: !!python/object:os.system x", "is not a readable YAML file"),
        ("layout: gguf", "layout is 'gguf': choose one of torchao, comfy"),
        ("layout: [torchao]", r"layout is \['torchao'\]: choose one of"),
        ("layout: {}", "layout is {}: choose one of"),
        ("layout:", "layout is None: choose one of"),
        ("scheme: w8a8", "scheme is 'w8a8': choose one of w4a16, w4a4, none"),
        ("sequences: 1", "sequences is 1: give a whole number from 2 to"),
        ("keep_first: true", "keep_first is True: give a whole number from 0 to"),
        ("text: 3", "text is 3: name a text file"),
        ("rotate: no", "rotate is False: choose one of none, r1"),
        ("rotation_kind: block", "rotation_kind is 'block': choose one of hadamard, block-16"),
        ("dtype: bf16", "dtype is 'bf16': choose one of source, bfloat16"),
        ("seed: true", "seed is True: give a whole number from 0 to"),
        ("seed: '1'", "seed is '1': give a whole number"),
        ("seed: 1.0", "seed is 1.0: give a whole number"),
        ("seed: -1", "seed is -1: give a whole number"),
        ("seed: [1]", r"seed is \[1\]: give a whole number"),
        ("seed:", "seed is None: give a whole number"),
        ("seed: 18446744073709551616", "give a whole number from 0 to"),
        ("ignore: x", "ignore is 'x': give a list of patterns"),
        ("ignore: [1]", r"ignore is \[1\]: give a list of patterns"),
        ("include: {a: b}", "include is {'a': 'b'}: give a list of patterns"),
        ("include:", "include is None: give a list of patterns"),
        ("ignore: ['re:(']", r"ignore has 're:\(', which is no regular expression \(missing \)"),
        ("layout: comfy\nseed: 1\nlayout: comfy", "the key 'layout' stands twice in line 3"),
        ("recipe: {seed: 1, seed: 2}", "the key 'seed' stands twice"),
        ("[a]: b", "is not a readable YAML file"),
        ("seed: 2001-13-45", "is not a readable YAML file"),
        ("[" * 500, "is not a readable YAML file"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence) as caught:
        load(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "recipe.yaml") in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="is not a readable YAML file"):
        load(str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        (" 0.5TB ", 5 * 10**11),
        ("300MB", 3 * 10**8),
        ("1KB", 1000),
        ("0.001KB", 1),
        ("1e2MB", 10**8),
    ],
)
def test_shard_sizes(text: str, size: int) -> None:
    assert Recipe(max_shard_size=text).max_shard_bytes == size


@pytest.mark.parametrize(
    "text",
    ["", "5", "GB", "5B", "5GiB", "five GB", "0GB", "-1GB", "0.0001KB", "nanGB", "infGB", "1e999GB",
     5, 5.0, None, True, ["5GB"]],
)  # fmt: skip
def test_shard_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(RecipeError, match=r"max_shard_size is .*: give a number and KB, MB, GB or"):
        Recipe(max_shard_size=text)


def test_options_replace_what_they_name() -> None:
    wish = Recipe(layout="comfy", seed=3, ignore=("a",))
    assert wish.merged() == wish
    assert wish.merged(layout=None, seed=None, ignore=None) == wish
    merged = wish.merged(seed=0, ignore=(), dtype="float16")
    assert merged == Recipe(layout="comfy", seed=0, ignore=(), dtype="float16")
    assert wish == Recipe(layout="comfy", seed=3, ignore=("a",))


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"layout": "gguf"}, "^--layout is 'gguf': choose one of torchao"),
        ({"rotation_kind": "x"}, "^--rotation-kind is 'x': choose"),
        ({"seed": -1}, "^--seed is -1: give a whole number"),
        ({"max_shard_size": "5"}, "^--max-shard-size is '5': give a number and"),
        ({"ignore": ("a", "re:[")}, r"^--ignore has 're:\[', which is no regular expression"),
    ],
)
def test_an_option_that_makes_no_sense_is_wrong_usage(
    option: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        Recipe(layout="comfy").merged(**option)
    assert (UsageError.exit_code, RecipeError.exit_code) == (2, 1)
