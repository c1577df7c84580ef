"""Folds of vision-language models, shown text and a picture."""

import architectures
import pytest
from architectures import Case

from nvfp4cli.check.compare import LIMIT, check


@pytest.mark.parametrize("case", architectures.PICTURES, ids=lambda case: case.id)
def test_a_fold_holds_with_a_picture(case: Case) -> None:
    report = check(case.config)
    assert report.pictures is True
    assert {v.rotation for v in report.verdicts if v.result == "refused"} == case.refused
    errors = [v.error for v in report.verdicts if v.rotation not in case.refused]
    assert all(error is not None and error <= LIMIT / 1000 for error in errors)
