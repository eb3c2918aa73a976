"""The watchdog: moves, limits, actions; on a virtual clock."""

import asyncio

import pytest

from freewheel.control.waits import WaitTable
from freewheel.control.watchdog import Stage, Watchdog
from freewheel.errors import RecordError, StalledError
from freewheel.simulation.virtual_time import run_virtual


class Work:
    def __init__(self):
        self.left = True
        self.moved = 0
        self.recovered = 0

    def recover(self):
        self.recovered += 1


class Reports:
    def __init__(self):
        self.stalls = []

    async def report(self, stall):
        self.stalls.append((asyncio.get_running_loop().time(), stall))


def make(work, *, action="end", recover=None, limit_s=10.0):
    reports = Reports()
    waits = WaitTable()
    stage = Stage(
        name="rollout",
        limit_s=limit_s,
        setting="rollout.timeout_s",
        has_work=lambda: work.left,
        progress=lambda: work.moved,
        recover=recover,
    )
    return Watchdog([stage], action=action, waits=waits, reporter=reports), reports, waits


def test_a_stage_that_stands_still_ends_the_run_within_its_limit():
    async def main():
        watchdog, reports, waits = make(Work())
        with (
            waits.waiting("a", "x", held_by=("b",)),
            waits.waiting("b", "y", held_by=("a",)),
            pytest.raises(StalledError, match="closed circle of waits: a -> b -> a"),
        ):
            await watchdog.run()
        (at_s, stall), *_ = reports.stalls
        assert 10.0 < at_s <= 12.0
        assert stall.stage == "rollout"
        assert "rollout.timeout_s" in stall.sentence()

    run_virtual(main)


@pytest.mark.parametrize("idle", [True, False])
def test_a_stage_without_work_or_with_progress_is_left_alone(idle):
    async def main():
        work = Work()
        work.left = not idle
        watchdog, reports, _ = make(work)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watchdog.run())
            for _ in range(20):
                await asyncio.sleep(9.0)
                work.moved += 1
            watching.cancel()
        assert reports.stalls == []

    run_virtual(main)


def test_report_only_goes_on_and_reports_again_after_another_limit():
    async def main():
        watchdog, reports, _ = make(Work(), action="report")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(35.0):
                await watchdog.run()
        assert 2 <= len(reports.stalls) <= 3

    run_virtual(main)


def test_recover_is_tried_once_for_a_standstill():
    async def main():
        work = Work()
        watchdog, reports, _ = make(work, action="recover", recover=work.recover)
        with pytest.raises(StalledError):
            await watchdog.run()
        assert work.recovered == 1
        assert len(reports.stalls) == 2

    run_virtual(main)


def test_recover_without_a_way_to_recover_ends_the_run():
    async def main():
        watchdog, _, _ = make(Work(), action="recover")
        with pytest.raises(StalledError):
            await watchdog.run()

    run_virtual(main)


@pytest.mark.parametrize("action", ["end", "report"])
def test_a_stall_that_cannot_be_recorded_ends_the_run_as_a_stall(action):
    async def main():
        watchdog, reports, _ = make(Work(), action=action)

        async def refuse(stall):
            raise RecordError("no space left")

        reports.report = refuse
        with pytest.raises(StalledError, match="rollout has work but has not moved"):
            await watchdog.run()

    run_virtual(main)
