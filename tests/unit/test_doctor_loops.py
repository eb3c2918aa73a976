"""The doctor's patterns of blocked event loops, on stacks made for the purpose."""

from dataclasses import replace

import pytest

from freewheel.doctor import Certainty
from freewheel.doctor.patterns_loop import blocked_loops
from freewheel.doctor.stacks import RESTARTED, Syscall
from tests.unit.doctor_stacks import (
    IDLE_LOOP,
    LOOP,
    POOL,
    RESULT,
    THREAD,
    WAKE_UP_ONLY,
    process,
    thread,
    with_history,
)

CALLER = "work (app.py:5)"


def on_loop(top, **facts):
    return thread(f"{top}\n{CALLER}{LOOP}", **facts)


def found(*threads, **facts):
    return [(one.pattern, one.certainty) for one in blocked_loops(process(*threads, **facts))]


@pytest.mark.parametrize(
    ("top", "pattern"),
    [
        (RESULT, "result"),
        ("wait (threading.py:3)\nwait (concurrent/futures/_base.py:9)", "futures"),
        ("join (threading.py:9)\nshutdown (concurrent/futures/thread.py:9)", "shutdown"),
        ("get_objects (ray/_private/worker.py:9)\nget (ray/_private/worker.py:99)", "ray-get"),
        (
            "wait (ray/_private/worker.py:9)\nwrapper (ray/_private/client_mode_hook.py:4)",
            "ray-wait",
        ),
        ("_get (ray/util/client/worker.py:9)\nget (ray/util/client/worker.py:99)", "ray-get"),
        ("wait (threading.py:3)\nget (queue.py:171)", "queue"),
        ("wait (threading.py:3)\nput (queue.py:140)", "queue"),
        ("poll (multiprocessing/connection.py:9)\nget (multiprocessing/queues.py:99)", "queue"),
        ("select (selectors.py:416)\ncommunicate (subprocess.py:9)", "subprocess"),
        (
            "poll (multiprocessing/popen_fork.py:9)\njoin (multiprocessing/process.py:9)",
            "subprocess",
        ),
        ("_wait_for_tstate_lock (threading.py:9)\njoin (threading.py:99)", "join"),
        ("wait (threading.py:3)\nwait (threading.py:629)", "event"),
        ("wait (threading.py:3)\nacquire (threading.py:507)", "event"),
        ("_recv (multiprocessing/connection.py:9)", "pipe"),
        ("readinto (socket.py:9)\n_read_status (http/client.py:99)", "socket"),
        ("read (ssl.py:1099)", "socket"),
        ("wait (threading.py:3)\n_blocking (grpc/_channel.py:9)", "rpc"),
    ],
)
def test_waits_with_frames_of_their_own_are_certain(top, pattern):
    assert found(on_loop(top)) == [(f"loop-blocked-{pattern}", Certainty.CERTAIN)]


@pytest.mark.parametrize(
    ("source", "syscall", "expected"),
    [
        ("time.sleep(5)", "sleep", ("sleep", "certain")),
        ("time.sleep(5)", RESTARTED, ("sleep", "certain")),
        ("time.sleep(5)", None, ("sleep", "likely")),
        ("helper()", "sleep", ("sleep", "certain")),
        ("with self.lock:", "futex", ("lock", "certain")),
        ("self.lock.acquire()", "futex", ("lock", "certain")),
        ("self.lock.acquire()", "read", ("native", "possible")),
        ("os.waitpid(pid, 0)", "wait", ("subprocess", "certain")),
        ("data = connection.recv(10)", "recv", ("socket", "certain")),
        ("fcntl.flock(file, fcntl.LOCK_EX)", "flock", ("file-lock", "certain")),
        ("item = numbers.get()", "futex", ("queue", "certain")),
        ("answer = input()", "read", ("input", "certain")),
        ("helper()", "futex", ("native", "possible")),
        (None, "system call 999", ("native", "possible")),
    ],
)
def test_calls_without_a_frame_need_their_text_and_the_system_call(source, syscall, expected):
    syscall = None if syscall is None else Syscall(name=syscall)
    pattern, certainty = expected
    sources = {"work": source}
    assert found(on_loop("", sources=sources, syscall=syscall)) == [
        (f"loop-blocked-{pattern}", certainty)
    ]


def test_the_evidence_is_the_call_and_the_caller_is_the_first_user_frame():
    (one,) = blocked_loops(process(on_loop(f"{RESULT}\nwrapper (bridge.py:3)")))
    assert str(one.evidence) == "result (concurrent/futures/_base.py:451)"
    assert str(one.caller) == "wrapper (bridge.py:3)"
    assert str(one.entry) == "work (app.py:5)"


@pytest.mark.parametrize(
    "healthy",
    [
        thread(IDLE_LOOP),
        thread(IDLE_LOOP + THREAD, name="AsyncIO Thread: default"),
        # Under uvloop the loop has no frame of its own.
        thread("run (asyncio/runners.py:118)\nrun (asyncio/runners.py:190)"),
        thread(THREAD, name="AsyncIO Thread: default"),
        thread("get_events (trio/_core/_io_epoll.py:9)\nunrolled_run (trio/_core/_run.py:9)"),
        # A loop in a cell of a notebook, which runs on the kernel's loop.
        thread(f"{IDLE_LOOP}\nrun (nest_asyncio.py:30)\n<module> (cell.py:1)\n{LOOP}"),
        thread(f"work (cell.py:3)\nrun_code (IPython/core/interactiveshell.py:9)\n{LOOP}"),
        # No loop at all.
        thread(f"{RESULT}\nmain (app.py:9)"),
        thread(f"wait (threading.py:3)\nget (queue.py:9)\nmain (app.py:9)\n{POOL}"),
        # A loop that computes.
        thread(f"{CALLER}\n{LOOP}", active=True),
    ],
)
def test_healthy_threads_are_left_alone(healthy):
    assert found(healthy) == []


def test_a_loop_that_moves_is_left_alone():
    now, before = on_loop(RESULT), thread(f"{RESULT}\nwork (app.py:4)\n{LOOP}")
    assert blocked_loops(with_history(process(now), (before,))) == []


def test_a_loop_that_ran_in_one_sample_is_left_alone():
    now = on_loop(RESULT)
    assert blocked_loops(with_history(process(now), (replace(now, active=True),))) == []


def test_a_loop_under_uvloop_on_rays_thread_is_seen():
    blocked = thread(f"{RESULT}\n{CALLER}\n{THREAD}", name="AsyncIO Thread: default")
    assert found(blocked) == [("loop-blocked-result", Certainty.CERTAIN)]


def test_one_sample_makes_it_less_sure():
    assert found(on_loop(RESULT), num_samples=1) == [("loop-blocked-result", Certainty.LIKELY)]


def test_many_wakeups_make_it_less_sure():
    now = on_loop("get_objects (ray/_private/worker.py:9)", num_switches=200)
    before = replace(now, num_switches=0)
    (one,) = blocked_loops(with_history(process(now), (before,), (before,)))
    assert one.certainty is Certainty.LIKELY
    assert "many short waits" in one.why


def inner(**facts):
    return thread(IDLE_LOOP + POOL, number=2, name="bridge_0", **{"syscall": WAKE_UP_ONLY} | facts)


def test_the_closed_cycle():
    (one,) = blocked_loops(process(on_loop(RESULT), inner()))
    assert (one.pattern, one.certainty) == ("deadlock-asyncio-run", Certainty.LIKELY)
    assert "'bridge_0'" in one.why


@pytest.mark.parametrize(
    ("syscall", "words"),
    [
        (Syscall(name="epoll", no_timeout=False, num_watched=0), "has a timer set"),
        (Syscall(name="epoll", no_timeout=True, num_watched=2), "watches 2 descriptors"),
    ],
)
def test_a_coroutine_that_can_end_by_itself_is_no_deadlock(syscall, words):
    (one,) = blocked_loops(process(on_loop(RESULT), inner(syscall=syscall)))
    assert (one.pattern, one.certainty) == ("loop-frozen-by-asyncio-run", Certainty.CERTAIN)
    assert words in one.why


def test_a_coroutine_that_computes_is_no_deadlock():
    busy = thread(f"score (app.py:3)\n{LOOP}{POOL}", number=2, active=True, syscall=None)
    assert found(on_loop(RESULT), busy) == [("loop-frozen-by-asyncio-run", Certainty.CERTAIN)]


def test_other_work_in_a_pool_makes_the_cycle_less_sure():
    other = thread(f"load (app.py:3)\n{POOL}", number=3, name="loader_0")
    assert found(on_loop(RESULT), inner(), other) == [("deadlock-asyncio-run", Certainty.POSSIBLE)]


def test_the_loops_own_executor_does_not():
    other = thread(f"load (app.py:3)\n{POOL}", number=3, name="asyncio_0")
    assert found(on_loop(RESULT), inner(), other) == [("deadlock-asyncio-run", Certainty.LIKELY)]


def test_a_background_loop_of_another_purpose_is_no_part_of_a_cycle():
    server = thread(IDLE_LOOP + THREAD, number=2, name="server", syscall=WAKE_UP_ONLY)
    assert found(on_loop("wait (threading.py:3)\nget (queue.py:9)"), server) == [
        ("loop-blocked-queue", Certainty.CERTAIN)
    ]


def test_a_thread_that_asks_back():
    source = {"ask": "return asyncio.run_coroutine_threadsafe(one(), loop).result()"}
    asker = thread(f"{RESULT}\nask (app.py:9)\n{POOL}", number=2, name="asker", sources=source)
    (one,) = blocked_loops(process(on_loop(RESULT), asker))
    assert (one.pattern, one.certainty) == ("deadlock-asyncio-run", Certainty.LIKELY)
    assert "run_coroutine_threadsafe" in one.why


def test_a_loop_that_waits_for_itself():
    source = {"work": "asyncio.run_coroutine_threadsafe(one(), loop).result()"}
    assert found(on_loop(RESULT, sources=source)) == [("deadlock-own-loop", Certainty.LIKELY)]
