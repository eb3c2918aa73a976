"""The admission rule and the choice of a batch: bounds hold, and waiting never becomes for ever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.config.sections import ActorConfig, AsyncTrainingConfig, Config
from freewheel.control.staleness import BatchRule, Candidate, StalenessBound, choose_batch


def slots(per_version, threshold):
    return Config(
        actor=ActorConfig(ppo_mini_batch_size=per_version),
        async_training=AsyncTrainingConfig(staleness_threshold=threshold),
    ).max_slots


def bound(*, per_version=4, threshold=0.5, max_staleness=1):
    rule = StalenessBound(max_open=slots(per_version, threshold), max_staleness=max_staleness)
    rule.publish(0, num_trained=0)
    return rule


def test_so_many_groups_are_open_at_most():
    rule = bound()
    assert rule.max_open == 6
    assert rule.required_version(num_trained=0, num_open=5) == 0
    assert rule.required_version(num_trained=0, num_open=6) is None
    assert rule.required_version(num_trained=4, num_open=2) is None
    rule.publish(1, num_trained=4)
    assert rule.required_version(num_trained=4, num_open=1) == 0
    assert rule.required_version(num_trained=4, num_open=2) == 1


def test_threshold_zero_starts_only_what_the_version_trains_on():
    rule = bound(threshold=0.0, max_staleness=0)
    assert rule.required_version(num_trained=3, num_open=0) == 0
    assert rule.required_version(num_trained=4, num_open=0) is None
    rule.publish(1, num_trained=4)
    assert rule.required_version(num_trained=4, num_open=3) == 1


def test_state_goes_on_after_restore():
    rule = bound()
    rule.publish(1, num_trained=4)
    other = StalenessBound(max_open=6, max_staleness=1)
    other.restore(rule.state())
    assert other.knows(1)
    for num_open in range(8):
        assert other.required_version(num_trained=4, num_open=num_open) == rule.required_version(
            num_trained=4, num_open=num_open
        )


def rule_for(**changes):
    fields = {
        "size": 2,
        "version": 3,
        "steps_left": 1,
        "groups_per_step": 2,
        "groups_per_version": 2,
        **changes,
    }
    return BatchRule(**fields)


def group(group_id, version, *, ready=True, max_staleness=1):
    return Candidate(group_id=group_id, expires=version + max_staleness, ready=ready)


def test_oldest_are_taken_first():
    groups = [group(9, 3), group(7, 2), group(8, 2), group(5, 3)]
    assert choose_batch(groups, rule_for()) == [7, 8]


def test_too_few_ready_groups_wait():
    assert choose_batch([group(1, 3), group(2, 3, ready=False)], rule_for()) is None


def test_a_slow_group_that_would_expire_is_waited_for():
    slow = group(1, 2, ready=False)
    others = [group(2, 3), group(3, 3)]
    assert choose_batch([slow, *others], rule_for()) is None
    assert choose_batch([slow, *others], rule_for(steps_left=2, groups_per_version=4)) == [2, 3]
    patient = group(1, 2, ready=False, max_staleness=2)
    assert choose_batch([patient, *others], rule_for()) == [2, 3]


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    per_step=st.integers(1, 4),
    trigger=st.integers(1, 3),
    threshold=st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.7, 3.0]),
)
def test_whatever_finishes_when_no_group_is_ever_trained_too_late(
    data, per_step, trigger, threshold
):
    """A random schedule of starts and finishes against a model trainer."""
    bound_versions = -int(-threshold // 1)
    per_version = per_step * trigger
    max_open = slots(per_version, threshold)
    rule = StalenessBound(max_open=max_open, max_staleness=bound_versions)
    rule.publish(0, num_trained=0)
    version = steps = num_trained = next_id = 0
    started: dict[int, tuple[int, bool]] = {}
    for _ in range(60):
        required = rule.required_version(num_trained=num_trained, num_open=len(started))
        running = [g for g, (_, ready) in started.items() if not ready]
        candidates = [
            group(g, started_at, ready=ready, max_staleness=bound_versions)
            for g, (started_at, ready) in started.items()
        ]
        chosen = choose_batch(
            candidates,
            rule_for(
                size=per_step,
                version=version,
                steps_left=trigger - steps % trigger,
                groups_per_step=per_step,
                groups_per_version=per_version,
            ),
        )
        actions = []
        if required is not None:
            actions.append("start")
        if running:
            actions.append("finish")
        if chosen is not None:
            actions.append("train")
        assert actions, "nothing can happen any more"
        action = data.draw(st.sampled_from(actions))
        if action == "start":
            started[next_id] = (data.draw(st.integers(required, version)), False)
            next_id += 1
            assert len(started) <= max_open
        elif action == "finish":
            finished = data.draw(st.sampled_from(running))
            started[finished] = (started[finished][0], True)
        else:
            for group_id in chosen:
                started_at, ready = started.pop(group_id)
                assert ready
                assert 0 <= version - started_at <= bound_versions
            num_trained += per_step
            steps += 1
            if steps % trigger == 0:
                version += 1
                rule.publish(version, num_trained=num_trained)


def test_the_largest_number_of_open_groups_is_rounded_down():
    assert slots(3, 0.5) == 4
    assert slots(25, 0.16) == 29


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_group_that_expires_now_and_is_left_behind_blocks(max_staleness):
    groups = [group(1, 1, ready=False, max_staleness=max_staleness), group(2, 3), group(3, 3)]
    assert choose_batch(groups, rule_for()) is None
