"""Finds the event loop in a thread's stack, and what runs on top of it.

asyncio (also nested, and under uvloop), trio, and the loop of a Ray async actor.
"""

from dataclasses import dataclass

from freewheel.doctor.stacks import Frame, Origin, Track

RAY_LOOP_THREAD = "AsyncIO Thread"

_MACHINERY: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("asyncio/base_events.py", ("_run_once", "run_forever", "run_until_complete")),
    ("asyncio/runners.py", ("run",)),
    ("asyncio/events.py", ("_run",)),
    ("uvloop/", ()),
    ("nest_asyncio.py", ()),
    ("trio/_core/_run.py", ("unrolled_run", "run")),
)
_IDLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("selectors.py", ("select",)),
    ("trio/_core/_io_epoll.py", ("get_events",)),
)
# A notebook runs the user's cells on its loop, and they may block: that is how it works.
_NOTEBOOK = "IPython/core/interactiveshell.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A thread that runs an event loop.

    Attributes:
        track: the thread.
        running: the frames above the loop's own, innermost first; () if it waits for events.
    """

    track: Track
    running: tuple[Frame, ...]

    @property
    def is_idle(self) -> bool:
        """Whether the loop waits for its events, as a healthy loop without work does."""
        return all(_is_one_of(frame, _IDLE) for frame in self.running)

    @property
    def is_notebook(self) -> bool:
        """Whether a cell of a notebook runs on it."""
        return any(frame.is_at(_NOTEBOOK) for frame in self.running)


def loop_of(track: Track) -> Loop | None:
    """The innermost event loop that a thread runs, or None if it runs none."""
    frames = track.frames
    for index, frame in enumerate(frames):
        if _is_one_of(frame, _MACHINERY):
            return Loop(track=track, running=frames[:index])
    if not track.last.name.startswith(RAY_LOOP_THREAD):
        return None
    # Under uvloop the loop has no Python frame: it stands directly on the thread's own.
    start = (i for i, frame in enumerate(frames) if frame.is_at("threading.py", "run"))
    return Loop(track=track, running=frames[: next(start, len(frames))])


def first_user_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """The innermost frame of the user's code, or else of a library that is not Ray."""
    users = [frame for frame in frames if frame.origin is Origin.USER]
    return (users or [frame for frame in frames if _is_foreign(frame)] or [None])[0]


def last_user_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """The outermost frame of the user's code, or else of a library that is not Ray."""
    users = [frame for frame in frames if frame.origin is Origin.USER]
    return (users or [frame for frame in frames if _is_foreign(frame)] or [None])[-1]


def ray_calls_it_sync(frames: tuple[Frame, ...]) -> bool:
    """Whether Ray runs these frames as a sync method on the loop of an async actor."""
    return any(frame.is_at("ray/_private/async_compat.py", "wrapper") for frame in frames)


def _is_foreign(frame: Frame) -> bool:
    return frame.origin is Origin.LIBRARY and not frame.tail.startswith("ray/")


def _is_one_of(frame: Frame, table: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
    return any(frame.is_at(tail, *names) for tail, names in table)
