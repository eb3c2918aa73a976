"""Patterns of torch.distributed: ranks that wait in a collective, seen over several processes."""

from freewheel.doctor.findings import Certainty, Finding
from freewheel.doctor.loops import first_user_frame
from freewheel.doctor.remedies import COLLECTIVE_REMEDY, JOIN_GROUP_REMEDY
from freewheel.doctor.stacks import Frame, Process, Track, tracks

_C10D = "torch/distributed/distributed_c10d.py"
_JOINS = ("init_process_group", "_new_process_group_helper", "new_group")
_NATIVE_WAITS = ("ncclKernel", "ncclGroupEnd", "c10d::ProcessGroup", "gloo::")
_LIBRARIES = ("torch/distributed/",)


def waiting_collectives(processes: list[Process]) -> list[Finding]:
    """Ranks that did not leave a collective in any sample, and who of the others is elsewhere."""
    waiting = {process.pid: found for process in processes if (found := _collective(process))}
    return [
        _finding(process, *waiting[process.pid], _others(process, processes, waiting))
        for process in processes
        if process.pid in waiting
    ]


def _collective(process: Process) -> tuple[Track, Frame] | None:
    """The thread that stands in a collective throughout, and the frame of the collective."""
    for track in tracks(process):
        if not track.still:
            continue
        inner = [frame for frame in track.frames if not frame.native]
        calls = [frame for frame in _leading(inner) if frame.is_at(_C10D)]
        joins = [frame for frame in calls if frame.name in _JOINS]
        if joins:
            return track, joins[-1]
        if calls:
            return track, calls[-1] if calls[-1].name != "wrapper" else calls[0]
        native = [f for f in track.frames if any(word in f.function for word in _NATIVE_WAITS)]
        if native:
            return track, native[-1]
    return None


def _leading(frames: list[Frame]) -> list[Frame]:
    """The innermost frames, as far as they are torch.distributed's (and the store's below it)."""
    found: list[Frame] = []
    for frame in frames:
        if not any(frame.tail.startswith(folder) for folder in _LIBRARIES):
            break
        found.append(frame)
    return found


def _others(
    process: Process, processes: list[Process], waiting: dict[int, tuple[Track, Frame]]
) -> list[tuple[Process, Frame | None]]:
    """The other processes that use torch.distributed, with their collective or None."""
    return [
        (other, waiting[other.pid][1] if other.pid in waiting else None)
        for other in processes
        if other.pid != process.pid and _same_program(process, other)
    ]


def _same_program(one: Process, two: Process) -> bool:
    """Ranks run one script, or are actors of one class."""
    if one.actor or two.actor:
        return one.actor == two.actor
    return one.command.split()[:2] == two.command.split()[:2]


def _finding(
    process: Process, track: Track, frame: Frame, others: list[tuple[Process, Frame | None]]
) -> Finding:
    joining = frame.name in _JOINS
    absent = [other for other, at in others if at is None]
    differing = [(other, at) for other, at in others if at is not None and at.name != frame.name]
    seen = f"It stood in {frame} {process.span}."
    sure, told = Certainty.POSSIBLE, "Its peers may be slow, or gone: examine them too."
    if absent and len(process.samples) > 1:
        sure = Certainty.LIKELY
        told = " ".join(f"{other.label} is elsewhere: {_where(other)}." for other in absent)
    elif differing:
        sure = Certainty.LIKELY
        told = " ".join(f"{other.label} is in another one: {at}." for other, at in differing)
    what = "for other ranks to join its process group" if joining else f"in {frame.name}"
    return Finding(
        pattern="process-group-incomplete" if joining else "collective-waits",
        certainty=sure,
        pid=process.pid,
        title=f"A rank waits {what}" if joining else f"A rank waits {what} for its peers",
        why=f"{seen} A collective ends only when every rank has called it. {told}",
        remedy=JOIN_GROUP_REMEDY if joining else COLLECTIVE_REMEDY,
        thread=track.last.label,
        evidence=frame,
        caller=first_user_frame(track.frames),
    )


def _where(process: Process) -> str:
    """Where the main thread of a process is, for a sentence."""
    main = next((t for t in process.last.threads if t.name == "MainThread"), None)
    thread = main or process.last.threads[0]
    frame = first_user_frame(thread.frames)
    return "no Python frame" if frame is None else f"main thread at {frame}"
