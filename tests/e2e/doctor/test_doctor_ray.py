"""`freewheel doctor` on real Ray actors: the known deadlock in its three forms; healthy ones."""

import json

import psutil
import pytest

from freewheel.doctor import ray_processes
from tests.e2e.doctor.running import Programs, doctor

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def ray_report():
    programs = Programs()
    try:
        programs.start(("driver", "ray_actors.py"), env={"RAY_worker_niceness": "0"})
        pids = json.loads(programs.first_lines["driver"])
        # Other programs of this machine may use Ray too: they are found, and left alone.
        driver = psutil.Process(pids["driver"])
        family = {driver.pid, *(child.pid for child in driver.children(recursive=True))}
        mine = [pid for pid in ray_processes() if pid in family]
        code, data = doctor(*(f"--pid={pid}" for pid in mine))
        yield code, data, pids
    finally:
        programs.close()


def findings(report, name):
    _, data, pids = report
    return [one for one in data["findings"] if one["pid"] == pids[name]]


def test_all_workers_and_the_driver_are_found(ray_report):
    code, data, pids = ray_report
    examined = {process["pid"] for process in data["processes"]}
    assert set(pids.values()) <= examined
    assert not any("Agent" in process["command"] for process in data["processes"])
    assert code == 1


def test_a_sync_method_that_waits_for_a_queue_of_its_own_loop(ray_report):
    (found,) = findings(ray_report, "Rollouter")
    assert found["pattern"] == "deadlock-asyncio-run"
    assert found["certainty"] == "likely"
    assert "Ray actor Rollouter" in found["title"]
    assert found["thread"].startswith("'AsyncIO Thread: default'")
    assert found["evidence"]["function"] == "Future.result"
    assert found["caller"]["function"] == "auto_await.<locals>.wrapper"
    assert "_POOL.submit(asyncio.run, coroutine).result()" in found["caller"]["source"]
    assert found["entry"]["function"] == "Rollouter.do_validate"
    assert "do_validate is not an async method to Ray" in found["why"]
    assert "'bridge_0'" in found["why"]
    assert "make the method `async def`" in found["remedy"]


def test_a_wrapper_that_ray_calls_from_a_sync_frame(ray_report):
    (found,) = findings(ray_report, "Decorated")
    assert found["pattern"] == "deadlock-asyncio-run"
    assert "Ray actor Decorated" in found["title"]
    assert found["evidence"]["function"] == "Future.result"
    assert found["caller"]["function"] == "auto_await.<locals>.wrapper"
    assert found["entry"] is None
    assert "the decorator of do_validate hides an async def from Ray" in found["why"]
    assert "no plain decorator on it" in found["remedy"]


def test_a_loop_that_is_frozen_for_as_long_as_the_call_lasts(ray_report):
    (found,) = findings(ray_report, "Frozen")
    assert found["pattern"] == "loop-frozen-by-asyncio-run"
    assert found["certainty"] == "certain"
    assert "its loop has a timer set" in found["why"]
    assert "need not be a deadlock" in found["why"]
    assert found["caller"]["function"] == "auto_await.<locals>.wrapper"


@pytest.mark.parametrize(
    ("name", "pattern", "evidence"),
    [
        ("GetsOnLoop", "loop-blocked-ray-get", "get"),
        ("WaitsOnLoop", "loop-blocked-ray-wait", "wait"),
    ],
)
def test_ray_calls_that_block_the_loop(ray_report, name, pattern, evidence):
    (found,) = findings(ray_report, name)
    assert (found["pattern"], found["certainty"]) == (pattern, "certain")
    assert found["evidence"]["function"] == evidence
    assert found["caller"]["function"] == f"{name}.do_validate"


@pytest.mark.parametrize("name", ["Idle", "SyncIdle", "driver"])
def test_healthy_actors_and_the_driver(ray_report, name):
    assert findings(ray_report, name) == []


def test_nothing_else_is_found(ray_report):
    _, data, _ = ray_report
    assert len(data["findings"]) == 5
