"""What README.md and docs/specs.md say of architectures is what the specs say."""

import re
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from nvfp4cli.check.compare import check
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import Claim
from nvfp4cli.models.document import SPECS, known, read
from nvfp4cli.models.modules import module
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.rotate import fold

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "specs.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)


def table(text: str, first_column: str) -> list[list[str]]:
    """Cells of the rows of the table whose header starts so."""
    header = rf"^\| {re.escape(first_column)} \|.*\n\|[-|]+\n"
    found = re.search(header + r"((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, f"no table starts with {first_column}"
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[1].splitlines()]


ROWS = [(name, row) for row in table(README, "model types") for name in row[0].split(", ")]


def of(model_type: str) -> ArchSpec:
    """The spec, of a wrapper with the language model that its spec names."""
    document = read(SPECS / f"{model_type}.yaml")
    config = {"model_type": model_type}
    if "wraps" in document:
        config[document["wraps"]] = {"model_type": document["language_type"]}
    return specs.load_for(config, [])


def holds(spec: ArchSpec, rotation: str, *, mtp: bool = False) -> bool:
    claims = [Claim(m.pattern, m.pattern, "weight", m, 0) for m in spec.modules if mtp or not m.mtp]
    if mtp:
        claims += [
            Claim(m.pattern, m.pattern, "weight", m, 0, mtp=True) for m in spec.modules if m.mtp
        ]
    try:
        fold.check(rotation, spec, claims)
    except UnsupportedError:
        return False
    return True


def test_the_table_has_every_model_type_once():
    assert sorted(name for name, _ in ROWS) == known()


@pytest.mark.parametrize(("model_type", "row"), ROWS, ids=[name for name, _ in ROWS])
def test_a_row_says_what_the_spec_says(model_type, row):
    spec = of(model_type)
    _, r1, r2, experts, mtp = row
    for rotation, said in (("r1", r1), ("r2", r2)):
        assert re.search(r"\b(yes|no)\b", said)[0] == ("yes" if holds(spec, rotation) else "no")
    assert ("keeps the mean" in r1) == (spec.norm_kind == "layer")
    apart = any("{expert}" in m.pattern for m in spec.modules if not m.written_as)
    assert (experts != "-") == any(m.per_expert or "{expert}" in m.pattern for m in spec.modules)
    if model_type != "granitemoe":  # whose experts are apart only where they are quantised
        assert ("apart" in experts) == apart
    assert ("in one tensor" in experts) == any(m.per_expert for m in spec.modules)
    assert (mtp == "-") == (not any(m.mtp for m in spec.modules))
    if mtp != "-":
        assert (mtp == "without R1") == (not holds(spec, "r1", mtp=True))


def test_the_guide_has_every_key(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("model_type: x\nmodules: {}\nunknown: 1\n", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="the keys are") as refused:
        read(path)
    assert keys_in(str(refused.value)) == keys_of_table(0)
    with pytest.raises(UnsupportedError, match="the keys are") as refused:
        module(path, "a", {"role": "inner", "unknown": 1})
    assert keys_in(str(refused.value)) == keys_of_table(1)


def keys_in(sentence: str) -> set[str]:
    return set(sentence.rpartition("the keys are ")[2].rstrip(".").split(", "))


def keys_of_table(number: int) -> set[str]:
    """The keys of a spec (0) or of a module (1) in the guide."""
    part = GUIDE.split("## Keys of a ")[number + 1]
    return {key for row in table(part, "key") for key in re.findall(r"`(\w+)`", row[0])}


@pytest.mark.parametrize("text", EXAMPLES, ids=[yaml.safe_load(t)["model_type"] for t in EXAMPLES])
def test_an_example_of_the_guide_is_right(text, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    config = AutoConfig.for_model(yaml.safe_load(text)["model_type"]).to_diff_dict()
    report = check(config, path)
    assert [verdict.result for verdict in report.verdicts] == ["holds", "holds"]
    with pytest.raises(UnsupportedError, match="No architecture spec"):  # nor is it superfluous
        check(config)
