"""Planning of micro-batches: everything once, within the budget, in step over ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.trainer.attention import Packing
from freewheel.trainer.batching import (
    PlanSettings,
    Sample,
    make_samples,
    pack,
    plan_mini_batch,
    plan_rank,
    split_groups,
)
from freewheel.types import Trajectory
from tests.unit.trainer_models import make_groups

CPU = torch.device("cpu")


def samples_of(lengths: list[int]) -> list[Sample]:
    return [
        Sample(
            index=index,
            sample_id=str(index),
            input_ids=np.arange(length),
            rows=np.arange(length),
            targets=np.arange(length),
            rollout_logprobs=np.zeros(length, dtype=np.float32),
            versions=np.zeros(length, dtype=np.int64),
            advantage=1.0,
            weight=1.0,
        )
        for index, length in enumerate(lengths)
    ]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=24),
    max_tokens=st.integers(1, 60),
    world_size=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_every_sample_counts_once_and_ranks_keep_step(
    lengths: list[int], max_tokens: int, world_size: int
) -> None:
    samples = samples_of(lengths)
    plans = [
        plan_rank(samples, PlanSettings(max_tokens=max_tokens, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    counted = [s.index for plan in plans for part, counts in plan if counts for s in part]
    assert sorted(counted) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    for plan in plans:
        for part, _ in plan:
            assert part
            assert len(part) == 1 or sum(s.num_input_tokens for s in part) <= max_tokens


def test_ranks_get_equal_shares_of_tokens() -> None:
    samples = samples_of([8, 7, 6, 5, 4, 3, 2, 1])
    loads = [
        sum(
            s.num_input_tokens
            for part, _ in plan_rank(samples, PlanSettings(max_tokens=99, rank=rank, world_size=2))
            for s in part
        )
        for rank in range(2)
    ]
    assert loads == [18, 18]


def test_equal_lengths_become_one_run() -> None:
    assert Packing.of([5, 5, 3, 5]).runs == ((2, 5), (1, 3), (1, 5))


def test_multi_turn_trajectory_predicts_only_sampled_tokens() -> None:
    """Prompt 5 6, sampled 7 8, tool output 9, sampled 10, tool output 11."""
    trajectory = Trajectory(
        sample_id="a",
        group_id=0,
        reward=1.0,
        token_ids=np.array([5, 6, 7, 8, 9, 10, 11], dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1, 0], dtype=np.bool_),
        rollout_logprobs=np.array([0, 0, -1, -2, 0, -3, 0], dtype=np.float32),
        versions=np.array([-1, -1, 0, 0, -1, 1, -1], dtype=np.int32),
    )
    (sample,) = make_samples([[trajectory]], normalize_by_std=True, loss_agg_mode="token-mean")
    assert sample.targets.tolist() == [7, 8, 10]
    assert sample.input_ids[sample.rows].tolist() == [6, 7, 9]
    # What comes after the last token that predicts something does not go through the model.
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert sample.rollout_logprobs.tolist() == [-1, -2, -3]


def test_packed_row_restarts_positions_and_shifts_rows() -> None:
    micro = pack(samples_of([3, 2]), with_grad=True, counts=True, device=CPU)
    assert micro.input_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert micro.rows_N.tolist() == [0, 1, 2, 3, 4]
    assert micro.samples_N.tolist() == [0, 0, 0, 1, 1]
    assert micro.per_sequence_N.tolist() == pytest.approx([1 / 3] * 3 + [1 / 2] * 2)


def test_samples_without_gradient_only_go_forward() -> None:
    groups = make_groups(2, 4, seed=3)
    groups[0] = [
        Trajectory(**{f: getattr(t, f) for f in Trajectory.__dataclass_fields__} | {"reward": 1.0})
        for t in groups[0]
    ]
    samples = make_samples(groups, normalize_by_std=True, loss_agg_mode="token-mean")
    assert {s.advantage for s in samples[:4]} == {0.0}
    mini = plan_mini_batch(samples, PlanSettings(max_tokens=500), CPU)
    forward_only = {int(i) for m in mini.micro_batches if not m.with_grad for i in m.samples_N}
    assert forward_only >= {0, 1, 2, 3}
    mini = plan_mini_batch(samples, PlanSettings(max_tokens=500, all_with_grad=True), CPU)
    assert all(micro.with_grad for micro in mini.micro_batches)


def test_groups_are_split_in_order() -> None:
    groups = make_groups(5, 1)
    parts = list(split_groups(groups, 2))
    assert [[g[0].group_id for g in part] for part in parts] == [[0, 1], [2, 3], [4]]
