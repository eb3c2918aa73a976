"""Each failure, in each mode, at 200 random moments: an end or a recovery, never a silent stop."""

from collections import Counter

import pytest

from freewheel.simulation.settings import Failure
from tests.simulation.hang_cases import run_case
from tests.simulation.scenarios import FIELD_MODES

SEEDS = range(200)
FEW = 50
"""So many of them are run each time; `make test-long` runs the others."""

REPLACES = {
    Failure.ENGINE_NO_TOKENS,
    Failure.ENGINE_FROZEN,
    Failure.ENGINE_KILLED,
    Failure.WORKER_FROZEN,
    Failure.WORKER_KILLED,
    Failure.TRAINER_FROZEN,
    Failure.TRAINER_KILLED,
    Failure.WEIGHT_FETCH_NEVER_RETURNS,
}
ENDS = {
    Failure.CHECKPOINT_DISK_FULL: 7,
    Failure.CHECKPOINT_NEVER_RETURNS: 7,
    Failure.NEVER_PLACED: 3,
}


@pytest.mark.parametrize("mode", FIELD_MODES)
@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(SEEDS[:FEW], id="few"),
        pytest.param(SEEDS[FEW:], id="others", marks=pytest.mark.long),
    ],
)
def test_no_failure_at_any_moment_stops_the_run_in_silence(failure, mode, seeds):
    runs = [run_case(failure, mode, seed) for seed in seeds]
    struck = [run for run in runs if run.num_strikes > 0]
    assert len(struck) > 0.8 * len(seeds), "the failure has hardly ever struck"
    codes = Counter(run.end.exit_code for run in struck)
    if failure in ENDS:
        assert codes[ENDS[failure]] > 0.5 * len(struck), codes
    elif failure in REPLACES:
        replaced = sum(run.end.summary["restarts"] > 0 for run in struck)
        assert replaced > 0.5 * len(struck), f"{replaced} of {len(struck)} runs replaced a worker"
    else:
        timeouts = sum(_num_timeouts(run) > 0 for run in struck)
        assert timeouts > 0.9 * len(struck), f"{timeouts} of {len(struck)} runs saw a timeout"


def _num_timeouts(run):
    rows = run.recorder.rows("validations")
    in_training = run.end.summary["failures"].get("timeout", 0)
    retried = sum(row["attempt"] > 1 for row in run.recorder.rows("samples"))
    return in_training + retried + sum(row["n_timeout"] for row in rows)
