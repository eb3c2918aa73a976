"""What all end-to-end tests share."""

import pytest

from tests.e2e.runs import LIVE


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test():
    yield
    while LIVE:
        LIVE.pop().kill()
