"""How idle the replicas were, step by step and over the run."""

from statistics import fmean

from freewheel.simulation.run import simulate
from freewheel.simulation.settings import SimSettings
from tests.simulation.scenarios import small_config


def test_the_steps_idle_ratios_make_up_the_runs():
    run = simulate(small_config(val_before_train=False, test_freq=0), SimSettings(seed=4))
    assert run.end.exit_code == 0
    rows = run.recorder.rows("metrics")
    ratios = [row["fully_async/rollouter/idle_ratio"] for row in rows]
    assert len(ratios) == 8
    assert all(0 <= ratio <= 1 for ratio in ratios)
    assert len(set(ratios)) > 1
    weights = [row["timing_s/step"] for row in rows]
    mean = sum(r * w for r, w in zip(ratios, weights, strict=True)) / sum(weights)
    # The run's also has the start-up and the end, in which all are idle.
    assert mean <= run.end.summary["rollout_idle_ratio"] <= 1
    assert fmean(ratios) < 1
