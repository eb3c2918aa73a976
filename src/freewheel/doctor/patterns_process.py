"""Patterns of threads and whole processes: locks, the interpreter lock, stopped, dead workers."""

from itertools import takewhile

from freewheel.doctor.findings import Certainty, Finding
from freewheel.doctor.loops import first_user_frame
from freewheel.doctor.remedies import (
    GIL_REMEDY,
    LOADER_REMEDY,
    LOADER_STOPPED_REMEDY,
    LOCK_CYCLE_REMEDY,
    LOCK_REMEDY,
    STOPPED_REMEDY,
)
from freewheel.doctor.sources import lock_expressions, takes_lock
from freewheel.doctor.stacks import (
    RESTARTED,
    Child,
    Frame,
    Origin,
    Process,
    Sample,
    Thread,
    Track,
    tracks,
)

_STOPPED = ("T", "t")
_LOADER = "torch/utils/data/dataloader.py"
_LOADER_WORKER = "pt_data_worker"
_MAX_NATIVE = 3
_STARVED_WAKEUPS_PER_S = 50.0
_LET_GO_PER_S = 10.0


def stopped(process: Process) -> list[Finding]:
    """The process itself is stopped, by a signal or a debugger."""
    if any(sample.state not in _STOPPED for sample in process.samples):
        return []
    by = "a debugger" if process.last.state == "t" else "a signal (SIGSTOP, SIGTSTP, Ctrl-Z)"
    return [
        Finding(
            pattern="process-stopped",
            certainty=Certainty.CERTAIN,
            pid=process.pid,
            title=f"The whole process is stopped by {by}",
            why=f"Its state is {process.last.state} in all samples: none of its threads runs.",
            remedy=STOPPED_REMEDY,
        )
    ]


def lock_waits(process: Process) -> list[Finding]:
    """Threads that wait for a lock which a named other thread is seen to hold.

    Only what can be seen is claimed: the waiter stands on the line that takes an expression, the
    holder inside a `with` block of the same expression in the same file, and neither moves.
    """
    waiters = [track for track in tracks(process) if _waits_for_lock(track)]
    edges = [
        (waiter, holder, frame, text)
        for waiter in waiters
        for holder in tracks(process)
        if holder.last.thread_id != waiter.last.thread_id and holder.still
        for frame, text in _holds(holder, waiter)
    ]
    pairs = {(waiter.last.thread_id, holder.last.thread_id) for waiter, holder, _, _ in edges}
    found: list[Finding] = []
    seen: set[int] = set()
    for waiter, holder, frame, text in edges:
        cycle = (holder.last.thread_id, waiter.last.thread_id) in pairs
        if waiter.last.thread_id not in seen:
            # A cycle of two is told once.
            seen |= {waiter.last.thread_id, *([holder.last.thread_id] if cycle else [])}
            found.append(_lock_finding(process, waiter, holder, frame, text, cycle=cycle))
    return found


def _waits_for_lock(track: Track) -> bool:
    syscall = track.syscall
    return (
        track.waiting
        and takes_lock(track.last)
        and (syscall is None or syscall.name in ("futex", RESTARTED))
    )


def _holds(holder: Track, waiter: Track) -> list[tuple[Frame, str]]:
    """Frames of one thread inside a `with` block on what the other one is taking."""
    leaf = waiter.frames[0]
    wanted = lock_expressions(leaf.source or "")
    return [
        (frame, text)
        for frame in holder.frames
        if frame.path == leaf.path and _same_owner(frame, leaf)
        for text in frame.held
        if text in wanted
    ]


def _same_owner(holder: Frame, waiter: Frame) -> bool:
    """For `self.lock` both must be methods of one class (where names are qualified)."""
    if not any("self." in text for text in holder.held):
        return True
    return holder.function.rpartition(".")[0] == waiter.function.rpartition(".")[0]


def _lock_finding(
    process: Process, waiter: Track, holder: Track, frame: Frame, text: str, *, cycle: bool
) -> Finding:
    sure = Certainty.LIKELY if len(process.samples) > 1 else Certainty.POSSIBLE
    holding = f"thread {holder.last.label} is inside `with {text}` at {frame}"
    where = f", and now at {holder.frames[0]}" if holder.frames[0] != frame else ""
    title = f"Thread {waiter.last.label} waits for the lock {text}, held by {holder.last.label}"
    if cycle:
        title = (
            f"Threads {waiter.last.label} and {holder.last.label} each wait for a lock that the "
            "other one holds: a deadlock"
        )
    return Finding(
        pattern="lock-cycle" if cycle else "lock-held",
        certainty=sure,
        pid=process.pid,
        title=title,
        why=f"It stands on the line that takes {text}; {holding}{where}; neither "
        f"moved {process.span}. That both mean the same object is read off the source "
        "text, since Python's locks do not name their owner.",
        remedy=LOCK_CYCLE_REMEDY if cycle else LOCK_REMEDY,
        thread=waiter.last.label,
        evidence=waiter.frames[0],
        holder=frame,
    )


def held_gil(process: Process, native: tuple[Sample, ...] = ()) -> list[Finding]:
    """One native call holds the interpreter lock through all samples while others want it.

    Args:
        process: the samples.
        native: samples with native frames, taken after; they turn a suspicion into a finding.
    """
    owner = gil_suspect(process)
    if owner is None or not native:
        return []
    calls = [_native_call(sample, owner.last) for sample in native]
    # The call nearest to Python is the one that keeps the lock; what it calls may change.
    if not all(calls) or len({call[-1] for call in calls}) != 1:
        return []
    names = " < ".join(call.function for call in calls[-1][:_MAX_NATIVE])
    starved = ", ".join(track.last.label for track in _starved(process, owner))
    return [
        Finding(
            pattern="gil-held",
            certainty=Certainty.LIKELY,
            pid=process.pid,
            title=f"Thread {owner.last.label} holds the GIL in native code: {names}",
            why=f"It held the GIL at this line {process.span}, in the same native call. Waiting "
            f"for the GIL meanwhile: {starved}.",
            remedy=GIL_REMEDY,
            thread=owner.last.label,
            evidence=owner.frames[0],
            caller=first_user_frame(owner.frames),
        )
    ]


def gil_suspect(process: Process) -> Track | None:
    """The thread that held the interpreter lock at one line throughout while others starved.

    A thread that had let go of the lock in between, as running Python code does when asked, would
    have waited to get it back.
    """
    for track in tracks(process):
        if not all(thread.owns_gil for thread in track.history) or len(process.samples) < 2:
            continue
        let_go = (track.wakeups_per_s or 0.0) > _LET_GO_PER_S
        if track.still and not let_go and _starved(process, track):
            return track
    return None


def _starved(process: Process, owner: Track) -> list[Track]:
    """Threads that wait for the GIL.

    They stand still on a futex and wake every 5 ms to ask for it (CPython's switch interval),
    which no thread that waits for a lock does.
    """
    return [
        track
        for track in tracks(process)
        if track.last.thread_id != owner.last.thread_id
        and track.still
        and all(_may_be_on_futex(thread) for thread in track.history)
        and track.syscall is not None
        and track.syscall.name == "futex"
        and (track.wakeups_per_s or 0.0) > _STARVED_WAKEUPS_PER_S
    ]


def _may_be_on_futex(thread: Thread) -> bool:
    return thread.syscall is None or thread.syscall.name in ("futex", RESTARTED)


def _native_call(sample: Sample, owner: Thread) -> tuple[Frame, ...]:
    """The native frames above the owner's innermost Python frame, if it is still at its line."""
    for thread in sample.threads:
        if thread.thread_id == owner.thread_id and thread.owns_gil:
            native = tuple(takewhile(lambda frame: frame.native, thread.frames))
            python = [frame for frame in thread.frames if not frame.native][:1]
            return native if python == list(owner.frames[:1]) else ()
    return ()


def dead_loader_workers(process: Process) -> list[Finding]:
    """A DataLoader waits for a batch, and a worker process of it is dead or stopped."""
    found: list[Finding] = []
    for track in tracks(process):
        frame = next((f for f in track.frames if f.is_at(_LOADER, "_try_get_data")), None)
        if frame is None or not track.waiting or process.last.children is None:
            continue
        verdict = _judge_workers(process.last.children)
        if verdict is None:
            continue
        sure, what, remedy = verdict
        found.append(
            Finding(
                pattern="dataloader-worker-dead",
                certainty=sure,
                pid=process.pid,
                title=f"A DataLoader waits for a batch, but {what}",
                why=f"The thread stood in the DataLoader's _try_get_data {process.span}; "
                f"{what}. A batch that a dead worker had begun never comes; a lock of the queue "
                "that it held is never released.",
                remedy=remedy,
                thread=track.last.label,
                evidence=frame,
                caller=_user_frame(track.frames),
            )
        )
    return found


def _judge_workers(children: tuple[Child, ...]) -> tuple[Certainty, str, str] | None:
    named = [child for child in children if child.name == _LOADER_WORKER]
    dead = [child for child in children if child.state == "Z"]
    halted = [child for child in named or children if child.state in _STOPPED]
    if dead:
        sure = Certainty.CERTAIN if any(child in named for child in dead) else Certainty.LIKELY
        pids = ", ".join(str(child.pid) for child in dead)
        return sure, f"a worker process has died (pid {pids}, defunct)", LOADER_REMEDY
    if halted:
        pids = ", ".join(str(child.pid) for child in halted)
        return Certainty.CERTAIN, f"a worker process is stopped (pid {pids})", LOADER_STOPPED_REMEDY
    if not children:
        return Certainty.LIKELY, "it has no child process any more", LOADER_REMEDY
    return None


def _user_frame(frames: tuple[Frame, ...]) -> Frame | None:
    return next((frame for frame in frames if frame.origin is Origin.USER), None)
