"""What all end-to-end tests share."""

from pathlib import Path

import pytest

from tests.e2e.hangs.common import Faults
from tests.e2e.runs import LIVE


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test():
    yield
    while LIVE:
        LIVE.pop().kill()


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(tmp_path, monkeypatch)
