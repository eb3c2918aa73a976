"""Builds processes out of short stack texts, for the tests of the doctor's patterns."""

from dataclasses import replace

from freewheel.doctor.stacks import Frame, Process, Sample, Syscall, Thread

LOOP = """
_run (asyncio/events.py:80)
_run_once (asyncio/base_events.py:1922)
run_forever (asyncio/base_events.py:607)
run_until_complete (asyncio/base_events.py:640)
run (asyncio/runners.py:190)
"""
IDLE_LOOP = "select (selectors.py:468)" + LOOP.replace("_run (asyncio/events.py:80)", "")
THREAD = """
run (threading.py:982)
_bootstrap (threading.py:1002)
"""
POOL = (
    """
run (concurrent/futures/thread.py:58)
_worker (concurrent/futures/thread.py:83)"""
    + THREAD
)
RESULT = """
wait (threading.py:327)
result (concurrent/futures/_base.py:451)
"""
WAKE_UP_ONLY = Syscall(name="epoll", no_timeout=True, num_watched=0)
FUTEX = Syscall(name="futex")


def frames(text, sources=None):
    """Frames of lines like `name (file:line)`; `sources` gives the text of a line by its name."""
    found = []
    for line in text.split("\n"):
        if line.strip():
            function, _, place = line.strip().rpartition(" (")
            path, _, number = place.rstrip(")").rpartition(":")
            found.append(
                Frame(
                    function=function,
                    path=path,
                    short_path=path,
                    line=int(number),
                    source=(sources or {}).get(function),
                    native=path.endswith((".so", ".c")),
                )
            )
    return tuple(found)


def thread(stack, *, number=1, name="MainThread", sources=None, **facts):
    facts = {"active": False, "owns_gil": False, "syscall": FUTEX, "num_switches": 0} | facts
    return Thread(
        thread_id=number,
        os_thread_id=number,
        name=name,
        frames=frames(stack, sources),
        **facts,
    )


def process(*threads, num_samples=3, command="python program.py", pid=7, **facts):
    """A process that shows the same threads in every sample, half a second apart."""
    samples = tuple(
        Sample(time_s=index * 0.5, threads=threads, **facts) for index in range(num_samples)
    )
    return Process(pid=pid, command=command, samples=samples)


def with_history(one, *earlier):
    """The process with other threads in its earlier samples."""
    old = [
        replace(sample, threads=threads)
        for sample, threads in zip(one.samples, earlier, strict=False)
    ]
    return replace(one, samples=(*old, *one.samples[len(old) :]))
