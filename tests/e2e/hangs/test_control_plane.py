"""A control plane that is blocked, or whose workers find no room: the run ends by name."""

import pytest

from tests.e2e.hangs.common import LATE_S, USER_CODE, quick
from tests.e2e.runs import start

pytestmark = pytest.mark.e2e


def test_a_blocked_control_plane_is_ended_from_outside_with_the_frame(tmp_path):
    live = start(tmp_path, quick(), python_path=USER_CODE, module="blocked_control_plane")
    finished = live.finish(timeout_s=90)
    assert finished.code == 4, finished.err
    assert live.left_over() == []
    cause = finished.summary["cause"]
    assert "the event loop has not turned" in cause
    assert "block_at_step_3" in cause
    assert finished.summary["steps"] == 3
    (report,) = (finished.folder / "hang").iterdir()
    stacks = {path.name for path in (report / "stacks").iterdir()}
    assert {"control-plane.txt", "trainer-0.txt", "replica-0.txt", "worker-0.txt"} <= stacks
    assert "block_at_step_3" in (report / "stacks" / "control-plane.txt").read_text()
    assert "block_at_step_3" in (report / "summary.txt").read_text()


def test_workers_that_no_node_has_room_for_end_the_start_by_name(tmp_path):
    limit_s = 20
    changes = quick(health={"startup_timeout_s": limit_s}, ray={"num_cpus": 2})
    live = start(tmp_path, changes, python_path=USER_CODE, module="busy_cluster")
    finished = live.finish(timeout_s=90)
    assert finished.code == 3, finished.err
    assert live.left_over() == []
    cause = finished.summary["cause"]
    for part in (
        "did not come up within 20 s",
        "health.startup_timeout_s",
        "waits for",
        "of 2 CPU",
    ):
        assert part in cause
    # It is named while it lasts, too.
    (started,), (ended,) = finished.events("run_started"), finished.events("run_ended")
    assert limit_s <= ended["monotonic_s"] - started["monotonic_s"] < limit_s + LATE_S
