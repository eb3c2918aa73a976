"""Looking into an event loop: which tasks wait, and where."""

import asyncio
import types
from pathlib import Path
from typing import Any


def describe_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """One line a task that is not done: its name and the place where it waits."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    return "\n".join(f"  {task.get_name()}: {_place(task)}" for task in tasks)


def _place(task: asyncio.Task[Any]) -> str:
    awaitable: Any = task.get_coro()
    places: list[str] = []
    while isinstance(awaitable, types.CoroutineType):
        frame = awaitable.cr_frame
        if frame is not None:
            name = Path(frame.f_code.co_filename).name
            places.append(f"{frame.f_code.co_qualname} ({name}:{frame.f_lineno})")
        awaitable = awaitable.cr_await
    own = [place for place in places if not place.startswith(("Event.wait", "Future."))]
    return " -> ".join(own[-3:]) or "not started"
