"""Folds of every text model type, judged in fp64: exact, or refused for a known reason."""

import architectures
import pytest
from architectures import Case

from nvfp4cli.check.compare import LIMIT, check


@pytest.mark.parametrize("case", architectures.TEXT, ids=lambda case: case.id)
def test_a_fold_holds_or_is_refused(case: Case) -> None:
    report = check(case.config)
    assert {v.rotation for v in report.verdicts if v.result == "refused"} == case.refused
    for verdict in report.verdicts:
        if verdict.result == "refused":
            assert f"{verdict.rotation.upper()} does not hold for {case.model_type}: " in (
                verdict.reason
            )
        else:
            assert verdict.result == "holds"
            assert verdict.error is not None and verdict.error <= LIMIT / 1000
