"""User code that hangs: each case ends at its own limit, and the run goes on."""

import pytest

from tests.e2e.hangs.common import LATE_S, USER_CODE, quick
from tests.e2e.runs import start

pytestmark = pytest.mark.e2e


def test_what_never_returns_ends_at_its_own_limit_and_gives_its_slot_back(tmp_path):
    limits = {"reward_timeout_s": 2, "tool_timeout_s": 3, "timeout_s": 7}
    # Eight groups of four may be open: 32 rollouts. More cannot start until a slot is back.
    live = start(
        tmp_path,
        quick(
            rollout={
                "environment": "hanging_calls:Hangs",
                "reward": "hanging_calls:score",
                **limits,
            },
            async_training={"staleness_threshold": 1},
        ),
        python_path=USER_CODE,
    )
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    rows = {row["sample_id"]: row for row in finished.rows("samples")}
    expected = {
        "2-1": ("reward_timeout_s", "hanging_calls:score"),
        "3-1": ("tool_timeout_s", "ask_a_server"),
        "4-1": ("tool_timeout_s", "ask_a_program"),
        **{f"5-{i}": ("timeout_s", "hanging_calls:Hangs") for i in range(4)},
        "14-1": ("timeout_s", "hanging_calls:Hangs"),
    }
    for sample_id, (limit, culprit) in expected.items():
        row = rows[sample_id]
        assert (row["status"], row["failure"]) == ("failed", "timeout"), row
        assert culprit in row["message"]
        assert row["ended_s"] - row["started_s"] < limits[limit] + LATE_S
    # A group goes on with those that are there; nothing else is lost.
    for group in (2, 3, 4, 14):
        assert {rows[f"{group}-{i}"]["status"] for i in (0, 2, 3)} == {"trained"}
    assert finished.summary["failures"] == {"timeout": len(expected)}
    assert finished.summary["samples"]["open"] == 0
    # The group of which nothing is left is replaced by another one.
    assert finished.summary["samples"]["trained"] == 12 * 4 * 4 - 4
    assert finished.summary["restarts"] == 0
