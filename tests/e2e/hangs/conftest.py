"""Fixtures of the hang injections."""

from pathlib import Path

import pytest

from tests.e2e.hangs.common import Faults


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(tmp_path, monkeypatch)
