"""`freewheel doctor` on real processes: one per pattern, and healthy ones without a finding."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.doctor.running import Programs, doctor, settle

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Program -> pattern, certainty, function of the evidence frame, function of the caller's frame.
BLOCKED = {
    "result": ("loop-blocked-result", "certain", "result", "<lambda>"),
    "futures": ("loop-blocked-futures", "certain", "wait", "<lambda>"),
    "shutdown": ("loop-blocked-shutdown", "certain", "shutdown", "block"),
    "thread_queue": ("loop-blocked-queue", "certain", "get", "<lambda>"),
    "simple_queue": ("loop-blocked-queue", "certain", "<lambda>", "<lambda>"),
    "process_queue": ("loop-blocked-queue", "certain", "get", "<lambda>"),
    "lock": ("loop-blocked-lock", "certain", "<lambda>", "<lambda>"),
    "event": ("loop-blocked-event", "certain", "wait", "<lambda>"),
    "join": ("loop-blocked-join", "certain", "join", None),
    "sleep": ("loop-blocked-sleep", "certain", "<lambda>", "<lambda>"),
    "subprocess_wait": ("loop-blocked-subprocess", "certain", "run", "<lambda>"),
    "os_system": ("loop-blocked-subprocess", "certain", "<lambda>", "<lambda>"),
    "socket_read": ("loop-blocked-socket", "certain", "<lambda>", "<lambda>"),
    "http_read": ("loop-blocked-socket", "certain", "readinto", "<lambda>"),
    "file_lock": ("loop-blocked-file-lock", "certain", "<lambda>", "<lambda>"),
    "cycle": ("deadlock-asyncio-run", "likely", "result", "wrapper"),
    "frozen": ("loop-frozen-by-asyncio-run", "certain", "result", "wrapper"),
    "own_loop": ("deadlock-own-loop", "likely", "result", "block"),
    "asks_back": ("deadlock-asyncio-run", "likely", "result", "<lambda>"),
    "lock_held": ("lock-held", "likely", "waiter", None),
    "lock_cycle": ("lock-cycle", "likely", None, None),
    "gil": ("gil-held", "likely", "gil", "gil"),
    "stopped": ("process-stopped", "certain", None, None),
}
HEALTHY = (
    "idle_loop",
    "busy_loop",
    "thread_pool",
    "joined_main",
    "sync_sleep",
    "notebook",
    "process_pool",
    "server",
    "ask_from_thread",
    "blocking_off_the_loop",
    "lock_turns",
    "busy_threads",
    "loader",
)


class Report:
    """What the doctor said of each program."""

    def __init__(self, code, data, pids):
        self.code, self.data, self.pids = code, data, pids

    def findings(self, name):
        return [one for one in self.data["findings"] if one["pid"] == self.pids[name]]


def examined(pids):
    settle()
    code, data = doctor(*(f"--pid={pid}" for pid in pids.values()))
    assert data["failures"] == {}
    return Report(code, data, pids)


@pytest.fixture(scope="module")
def blocked(tmp_path_factory):
    programs = Programs()
    file = tmp_path_factory.mktemp("ranks") / "store"
    try:
        programs.start(
            *((name, "blocked.py", name) for name in BLOCKED),
            ("loader", "loader.py", "dead"),
            ("rank-0", "ranks.py", "0", str(file)),
            ("rank-1", "ranks.py", "1", str(file)),
        )
        yield examined(programs.pids)
    finally:
        programs.close()


@pytest.fixture(scope="module")
def healthy():
    programs = Programs()
    try:
        programs.start(
            *((name, "healthy.py", name) for name in HEALTHY if name != "loader"),
            ("loader", "loader.py", "healthy"),
        )
        yield examined(programs.pids)
    finally:
        programs.close()


@pytest.mark.parametrize("name", BLOCKED)
def test_each_pattern_is_recognised_with_its_evidence(blocked, name):
    pattern, certainty, evidence, caller = BLOCKED[name]
    findings = blocked.findings(name)
    (found,) = [one for one in findings if one["pattern"] == pattern]
    assert found["certainty"] == certainty
    assert found["remedy"]
    if evidence is not None:
        assert found["evidence"]["function"].endswith(evidence)
    if caller is not None:
        assert found["caller"]["function"].endswith(caller)


def test_a_lock_names_its_holder(blocked):
    held = [one for one in blocked.findings("lock") if one["pattern"] == "lock-held"]
    assert ["'holder'" in one["title"] for one in held] == [True]
    (found,) = blocked.findings("lock_held")
    assert found["holder"]["function"].endswith("holder")
    (cycle,) = blocked.findings("lock_cycle")
    assert "'forth'" in cycle["title"]
    assert "'back'" in cycle["title"]


def test_the_native_call_that_holds_the_interpreter_is_named(blocked):
    (found,) = blocked.findings("gil")
    assert "sleep" in found["title"]
    assert "'beat'" in found["why"]


def test_a_dead_worker_of_a_data_loader_is_named(blocked):
    (found,) = blocked.findings("loader")
    assert found["pattern"] == "dataloader-worker-dead"
    assert found["certainty"] == "certain"
    assert found["evidence"]["function"].endswith("_try_get_data")


def test_the_rank_that_is_elsewhere_is_named(blocked):
    (found,) = blocked.findings("rank-0")
    assert found["pattern"] == "collective-waits"
    assert found["certainty"] == "likely"
    assert found["evidence"]["function"] == "all_reduce"
    assert f"(pid {blocked.pids['rank-1']}) is elsewhere" in found["why"]
    assert blocked.findings("rank-1") == []


def test_every_finding_is_one_that_was_asked_for(blocked):
    patterns = [pattern for pattern, *_ in BLOCKED.values()]
    patterns += ["lock-held", "dataloader-worker-dead", "collective-waits"]
    assert sorted(one["pattern"] for one in blocked.data["findings"]) == sorted(patterns)


def test_findings_give_exit_code_1(blocked):
    assert blocked.code == 1


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_on_a_healthy_process(healthy, name):
    assert healthy.findings(name) == []


def test_no_finding_gives_exit_code_0(healthy):
    assert healthy.code == 0


def test_children_of_healthy_programs_are_healthy():
    import psutil

    programs = Programs()
    try:
        programs.start(("pool", "healthy.py", "process_pool"))
        children = psutil.Process(programs.pids["pool"]).children()
        assert len(children) == 2
        report = examined({child.pid: child.pid for child in children})
        assert (report.code, report.data["findings"]) == (0, [])
    finally:
        programs.close()


def test_an_examined_process_goes_on_as_before():
    programs = Programs()
    try:
        programs.start(("busy", "healthy.py", "busy_loop"))
        pid = programs.pids["busy"]
        code, _ = doctor(f"--pid={pid}", "--samples=5", "--interval=0.05")
        assert code == 0
        before = cpu_ticks(pid)
        settle(0.5)
        assert cpu_ticks(pid) > before
        os.kill(pid, signal.SIGTERM)
    finally:
        programs.close()


def cpu_ticks(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
