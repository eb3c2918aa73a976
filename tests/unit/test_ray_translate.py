"""Ray's errors become ours."""

import asyncio

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from freewheel.backends.ray.translate import translate
from freewheel.errors import (
    DataError,
    FreewheelError,
    LostError,
    ReplicaLostError,
    StartupError,
)


def of_task(cause):
    return RayTaskError("run", "Traceback: line 7", cause, pid=1, ip="127.0.0.1")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WorkerCrashedError(), ReplicaLostError),
        (ActorUnavailableError("no route", None), ReplicaLostError),
        (OutOfMemoryError("node is full"), ReplicaLostError),
        (TaskCancelledError(), ReplicaLostError),
        (of_task(TaskCancelledError()), ReplicaLostError),
        (of_task(asyncio.CancelledError()), ReplicaLostError),
        (of_task(WorkerCrashedError()), ReplicaLostError),
        (of_task(DataError("no rows")), DataError),
        (of_task(ValueError("bad")), FreewheelError),
        (ObjectLostError("00" * 28, None, ""), LostError),
        (ActorUnschedulableError("no such node"), StartupError),
    ],
)
def test_each_error_has_one_translation(error, expected):
    translated = translate(error, lost=ReplicaLostError, who="replica-3: generate")
    assert type(translated) is expected


def test_messages_name_the_call_and_keep_the_remote_traceback():
    text = str(translate(of_task(ValueError("bad")), lost=LostError, who="worker-1: prepare"))
    assert text.startswith("worker-1: prepare: ")
    assert "Traceback: line 7" in text
