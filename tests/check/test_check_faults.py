"""Negative controls: a fault of a fold raises the error by orders of magnitude."""

from pathlib import Path

import pytest
from folds import FAULTS, Fault, Folded

from nvfp4cli.check.compare import LIMIT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_is_seen(fault: Fault, tmp_path: Path) -> None:
    twins = Folded(fault.case, tmp_path)
    assert twins.error(twins.fold(fault.rotation)) <= LIMIT
    assert fault.error(twins, tmp_path / "faulty") > 1e6 * LIMIT
