"""A thousand seeds over all modes: no deadlock, every promise kept."""

import random

import pytest

from tests.simulation.scenarios import (
    FIELD_MODES,
    VALIDATION_MODES,
    random_config,
    random_settings,
    run_and_check,
    small_config,
)

COMBINATIONS = [(mode, validation) for mode in FIELD_MODES for validation in VALIDATION_MODES]
SEEDS_PER_COMBINATION = 84  # 12 combinations: 1,008 seeds


@pytest.mark.parametrize(("mode", "validation_mode"), COMBINATIONS)
@pytest.mark.parametrize("faults", [False, True], ids=["healthy", "faulty"])
def test_no_seed_deadlocks_or_breaks_a_promise(mode, validation_mode, faults):
    for seed in range(SEEDS_PER_COMBINATION // 2):
        rng = random.Random(f"{mode}/{validation_mode}/{faults}/{seed}")
        config = random_config(rng, mode, validation_mode)
        settings = random_settings(rng, seed, faults=faults)
        try:
            run_and_check(config, settings)
        except BaseException as error:
            error.add_note(f"seed {seed}: {config}\n{settings}")
            raise


@pytest.mark.parametrize(("mode", "validation_mode"), COMBINATIONS)
def test_same_seed_gives_the_same_trace(mode, validation_mode):
    config = small_config(mode, validation_mode)
    settings = random_settings(random.Random(mode), 7, faults=True)
    first, second = run_and_check(config, settings), run_and_check(config, settings)
    assert first.recorder.trace() == second.recorder.trace()
    assert first.digest == second.digest
    other = run_and_check(config, random_settings(random.Random(mode), 8, faults=True))
    assert first.recorder.trace() != other.recorder.trace()
