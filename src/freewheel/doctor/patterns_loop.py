"""Patterns of a blocked event loop: each takes a process's samples and returns findings.

A loop is blocked if its thread was, in every sample, waiting at the same line of code that runs
on the loop. Running code is no finding: it may be slow, but it moves.
"""

from dataclasses import replace

from freewheel.doctor.findings import Certainty, Finding
from freewheel.doctor.loops import (
    Loop,
    first_user_frame,
    last_user_frame,
    loop_of,
    ray_calls_it_sync,
)
from freewheel.doctor.remedies import BLOCKED_LOOP, CYCLE_REMEDY, FROZEN_REMEDY, OWN_LOOP_REMEDY
from freewheel.doctor.stacks import Frame, Process, Track, tracks
from freewheel.doctor.waits import Wait, WaitKind, recognise

_MANY_WAKEUPS_PER_S = 20.0
_CYCLE = (
    "The thread that could is the loop's, and that one waits here. If the coroutine needs a queue, "
    "a lock, a task or a worker that the blocked loop must give back, neither ever moves."
)
# Waits for the work of an executor, and all waits that the end of a thread can end.
_FOR_A_POOL = (WaitKind.RESULT, WaitKind.FUTURES, WaitKind.SHUTDOWN)
_FOR_A_THREAD = (*_FOR_A_POOL, WaitKind.JOIN)


def blocked_loops(process: Process) -> list[Finding]:
    """Every event loop of the process that is blocked, with the cycle if there is one."""
    threads = tracks(process)
    found: list[Finding] = []
    for track in threads:
        loop = loop_of(track)
        if loop is None or loop.is_idle or loop.is_notebook or not track.waiting:
            continue
        wait = recognise(loop.running, track.syscall)
        if wait is not None:
            found.append(_finding(process, loop, wait, threads))
    return found


def _finding(process: Process, loop: Loop, wait: Wait, threads: list[Track]) -> Finding:
    if wait.kind is WaitKind.RESULT and _submits_to_a_loop(loop, wait):
        return _own_loop(process, loop, wait)
    if wait.kind in _FOR_A_THREAD:
        inner = _inner_loops(loop, wait, threads)
        if inner:
            return _bridge(process, loop, wait, inner, _is_ambiguous(loop, wait, inner, threads))
    return _plain(process, loop, wait)


def _plain(process: Process, loop: Loop, wait: Wait) -> Finding:
    """The loop is blocked, and nothing more is seen."""
    why, remedy = BLOCKED_LOOP[wait.kind]
    return _make(
        process,
        loop,
        wait,
        pattern=f"loop-blocked-{wait.kind.name.lower().replace('_', '-')}",
        certainty=_certainty(process, loop, wait),
        title=f"{_name(process, loop)} is blocked in {wait.kind}",
        why=f"{_seen(process, loop)} {why}",
        remedy=remedy,
    )


def _own_loop(process: Process, loop: Loop, wait: Wait) -> Finding:
    """The loop waits in result() for a coroutine that was given to a loop: its own, most likely."""
    return _make(
        process,
        loop,
        wait,
        pattern="deadlock-own-loop",
        certainty=Certainty.POSSIBLE if len(process.samples) < 2 else Certainty.LIKELY,
        title=f"{_name(process, loop)} waits in result() for a coroutine that it must run itself",
        why=f"{_seen(process, loop)} The calling line uses run_coroutine_threadsafe. If the loop "
        "that it names is this one, the coroutine can never start: the loop waits for itself.",
        remedy=OWN_LOOP_REMEDY,
    )


def _bridge(
    process: Process, loop: Loop, wait: Wait, inner: list[Track], ambiguous: bool
) -> Finding:
    """The loop waits for a thread that runs a loop of its own for one coroutine."""
    ends = [_ends_of_itself(track) for track in inner]
    if all(end is not None for end in ends):
        frozen = _frozen(process, loop, wait, inner, [end for end in ends if end])
        return replace(frozen, certainty=frozen.certainty.lowered()) if ambiguous else frozen
    told = " ".join(_told(track) for track in inner)
    if len(process.samples) < 2 or not any(_is_clear(track) for track in inner):
        return _unclear(process, loop, wait, told)
    return _make(
        process,
        loop,
        wait,
        pattern="deadlock-asyncio-run",
        certainty=Certainty.POSSIBLE if ambiguous else Certainty.LIKELY,
        title=f"{_name(process, loop)} waits in {wait.kind} for a coroutine that waits for it: "
        "a closed cycle",
        why=f"{_seen(process, loop)} {told} {_CYCLE}{_ray_note(process, loop, wait)}",
        remedy=CYCLE_REMEDY,
    )


def _told(track: Track) -> str:
    """What a thread that drives a coroutine is seen to do."""
    if _asks_a_loop(track):
        return (
            f"Thread {track.last.label} waits in result() for a coroutine that it gave to a loop "
            "with run_coroutine_threadsafe; if that is this loop, it cannot run it."
        )
    text = f"Thread {track.last.label} runs the coroutine with asyncio.run and is idle: its loop "
    if not _is_clear(track):
        return text + "waits for something that cannot be told."
    return (
        text + "has no timer and watches no descriptor but its own for wake-ups, so only another "
        "thread of this process can wake it."
    )


def _is_clear(track: Track) -> bool:
    """Whether the kernel says all of what the thread's loop waits for."""
    syscall = track.syscall
    if syscall is None:
        return False
    return _asks_a_loop(track) or (syscall.name == "epoll" and syscall.num_watched is not None)


def _unclear(process: Process, loop: Loop, wait: Wait, told: str) -> Finding:
    """As far as one dump tells: the loop is blocked; the cycle can only be suspected."""
    return _make(
        process,
        loop,
        wait,
        pattern="deadlock-asyncio-run",
        certainty=wait.certainty.lowered(),
        title=f"{_name(process, loop)} is blocked in {wait.kind} for a coroutine in another "
        "thread, which may wait for it: a closed cycle",
        why=f"{_seen(process, loop)} {told} {_CYCLE}{_ray_note(process, loop, wait)}",
        remedy=CYCLE_REMEDY,
    )


def _frozen(
    process: Process, loop: Loop, wait: Wait, inner: list[Track], ends: list[str]
) -> Finding:
    others = ", ".join(
        f"{track.last.label} ({end})" for track, end in zip(inner, ends, strict=True)
    )
    return _make(
        process,
        loop,
        wait,
        pattern="loop-frozen-by-asyncio-run",
        certainty=_certainty(process, loop, wait),
        title=f"{_name(process, loop)} is frozen in {wait.kind} for as long as a coroutine runs "
        "in another thread",
        why=f"{_seen(process, loop)} The coroutine runs with asyncio.run in thread {others}: it "
        "can end by itself, so this need not be a deadlock. Until it ends, every other task of "
        "the blocked loop stands still; if it comes to wait for one of them, it is for ever."
        f"{_ray_note(process, loop, wait)}",
        remedy=FROZEN_REMEDY,
    )


def _inner_loops(loop: Loop, wait: Wait, threads: list[Track]) -> list[Track]:
    """Threads that run one coroutine to its end, of those that the loop can be waiting for."""
    return [track for track in _awaited(loop, wait, threads) if _drives_a_coroutine(track)]


def _awaited(loop: Loop, wait: Wait, threads: list[Track]) -> list[Track]:
    """The threads that the loop can be waiting for: those of a pool first of all."""
    others = [t for t in threads if t.last.thread_id != loop.track.last.thread_id]
    in_pool = [t for t in others if any(_is_pool_work(frame) for frame in t.frames)]
    if in_pool and wait.kind in _FOR_A_POOL:
        # asyncio_N are the loop's own executor, whose work is awaited as a rule.
        return [t for t in in_pool if not t.last.name.startswith("asyncio_")] or in_pool
    return [t for t in others if any(f.is_at("threading.py", "run") for f in t.frames)]


def _is_pool_work(frame: Frame) -> bool:
    return frame.is_at("concurrent/futures/thread.py", "run")


def _drives_a_coroutine(track: Track) -> bool:
    runs_one = any(
        frame.is_at("asyncio/runners.py", "run")
        or frame.is_at("asyncio/base_events.py", "run_until_complete")
        for frame in track.frames
    )
    return runs_one or _asks_a_loop(track)


def _is_ambiguous(loop: Loop, wait: Wait, inner: list[Track], threads: list[Track]) -> bool:
    """Whether other threads do work too that the loop may be waiting for."""
    return len(_awaited(loop, wait, threads)) > len(inner)


def _ends_of_itself(track: Track) -> str | None:
    """What lets the coroutine of an inner loop go on by itself; None if nothing is seen."""
    inner = loop_of(track)
    if inner is None or not track.still:
        return "it moves" if not _asks_a_loop(track) else None
    if not inner.is_idle:
        return "it runs" if track.last.active else "it waits in a call of its own"
    syscall = track.syscall
    if syscall is None or syscall.name != "epoll":
        return None
    if syscall.no_timeout is False:
        return "its loop has a timer set"
    if syscall.num_watched:
        return f"its loop watches {syscall.num_watched} descriptors beside its own"
    return None


def _asks_a_loop(track: Track) -> bool:
    """Whether the thread waits in result() of run_coroutine_threadsafe."""
    wait = recognise(track.frames, track.syscall) if track.waiting else None
    if wait is None or wait.kind is not WaitKind.RESULT:
        return False
    return _text_has(track.frames, wait, "run_coroutine_threadsafe(")


def _submits_to_a_loop(loop: Loop, wait: Wait) -> bool:
    return _text_has(loop.running, wait, "run_coroutine_threadsafe(")


def _text_has(frames: tuple[Frame, ...], wait: Wait, text: str) -> bool:
    caller = first_user_frame(frames[wait.index + 1 :])
    return caller is not None and text in (caller.source or "")


def _certainty(process: Process, loop: Loop, wait: Wait) -> Certainty:
    """One look cannot tell a short wait from a long one; nor can a wait that wakes all the time."""
    wakeups = loop.track.wakeups_per_s
    if len(process.samples) < 2 or (wakeups is not None and wakeups > _MANY_WAKEUPS_PER_S):
        return wait.certainty.lowered()
    return wait.certainty


def _seen(process: Process, loop: Loop) -> str:
    if len(process.samples) < 2:
        return "Seen in one dump: a single look cannot tell a short wait from a long one."
    wakeups = loop.track.wakeups_per_s
    often = ""
    if wakeups is not None and wakeups > _MANY_WAKEUPS_PER_S:
        often = f", though it woke {wakeups:.0f} times a second: many short waits, or polling"
    return (
        f"In all {len(process.samples)} samples over {process.seconds:.1f} s the loop's thread "
        f"waited at this line{often}."
    )


def _ray_note(process: Process, loop: Loop, wait: Wait) -> str:
    """Why the method ran synchronously on the loop, where Ray's frames tell."""
    if not ray_calls_it_sync(loop.running):
        return ""
    caller, entry = (
        pick(loop.running[wait.index :]) for pick in (first_user_frame, last_user_frame)
    )
    method = process.method or "the method"
    if caller == entry:
        return (
            f" Ray calls the wrapper itself, from a sync frame of its own: the decorator of "
            f"{method} hides an async def from Ray, and the wrapper, finding that its caller is no "
            "coroutine, blocks, even if the remote call is awaited."
        )
    return (
        f" {method} is not an async method to Ray (a plain def), so Ray runs it on the loop's own "
        "thread."
    )


def _name(process: Process, loop: Loop) -> str:
    thread = loop.track.last.label
    if process.actor is None:
        return f"The event loop in thread {thread}"
    return f"The event loop of Ray actor {process.actor} (thread {thread})"


def _make(
    process: Process,
    loop: Loop,
    wait: Wait,
    *,
    pattern: str,
    certainty: Certainty,
    title: str,
    why: str,
    remedy: str,
) -> Finding:
    caller = first_user_frame(loop.running[wait.index :])
    entry = last_user_frame(loop.running[wait.index :])
    return Finding(
        pattern=pattern,
        certainty=certainty,
        pid=process.pid,
        title=title,
        why=why,
        remedy=remedy,
        thread=loop.track.last.label,
        evidence=loop.running[wait.index],
        caller=caller,
        entry=None if entry == caller else entry,
    )
