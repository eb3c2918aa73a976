"""The evidence of a stall, in a folder of its own under the run's `hang/`.

Says first, in one sentence, what stopped; then the waits, a closed circle if there is one, the
counters, the last events, and the Python stacks of every process of the run at that moment. Every
step has a deadline: the report is there within seconds and cannot hang itself.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import asdict
from pathlib import Path
from typing import Any

from freewheel.aio import describe_tasks
from freewheel.control.watchdog import Stall
from freewheel.doctor.dump import CannotExamineError, run_py_spy
from freewheel.last_resort import say
from freewheel.protocols import Recorder
from freewheel.threads import CallThread

STACKS_TIMEOUT_S = 3.0
REPORT_TIMEOUT_S = 5.0
_NUM_EVENTS = 200
_TAIL_BYTES = 200_000


class HangReporter:
    """Writes reports.

    Args:
        folder: the run's folder.
        processes: worker processes on this machine, by name.
        state: numbers that tell where the run stands.
        recorder: is told of each report.
    """

    def __init__(
        self,
        folder: Path,
        *,
        processes: Callable[[], Mapping[str, int]],
        state: Callable[[], dict[str, Any]],
        recorder: Recorder,
    ) -> None:
        self._folder = folder
        self._processes = processes
        self._state = state
        self._recorder = recorder
        self._thread = CallThread("hang-report")

    async def report(self, stall: Stall) -> None:
        """Write a report; at most `REPORT_TIMEOUT_S`. What cannot be written is said on stderr.

        Raises:
            RecordError: the run's records fail.
        """
        now_s = asyncio.get_running_loop().time()
        waits = json.dumps([asdict(wait) for wait in stall.waits], indent=1)
        path = await self._write_in_time(stall.stage, _summary(stall, now_s), waits=waits)
        self._recorder.event("stalled", stage=stall.stage, cause=stall.sentence(), report=str(path))

    async def report_block(self, process: str, cause: str) -> None:
        """Write a report on a worker process whose event loop is blocked; as `report`."""
        path = await self._write_in_time(f"{process}-loop", f"{cause}.")
        self._recorder.event("hang_report", process=process, report=str(path))

    async def _write_in_time(
        self, name: str, summary: str, *, waits: str | None = None
    ) -> Path | None:
        try:
            content = {
                "summary.txt": summary,
                "state.json": json.dumps(self._state(), indent=1, default=str),
                "stacks/control-plane-tasks.txt": describe_tasks(asyncio.get_running_loop()),
                **({} if waits is None else {"waits.json": waits}),
            }
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                return await self._thread.run(self.write, name, content)
        except Exception as error:  # noqa: BLE001 - what is reported must not be hidden by the report
            say(f"hang report of {name}: {type(error).__name__}: {error}")
        return None

    def write(self, name: str, content: Mapping[str, str]) -> Path:
        """Write texts, events and stacks into a new folder. Blocks; for a thread.

        Args:
            name: what stopped, for the folder's name.
            content: text by file name.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = self._folder / "hang" / f"{stamp}-{name.replace(' ', '-')}"
        (folder / "stacks").mkdir(parents=True, exist_ok=True)
        for file, text in content.items():
            (folder / file).write_text(text + "\n")
        (folder / "stacks" / "control-plane.txt").write_text(own_stacks())
        (folder / "events.jsonl").write_text(self._last_events())
        for process, text in self._stacks().items():
            (folder / "stacks" / f"{process}.txt").write_text(text + "\n")
        return folder

    def _stacks(self) -> dict[str, str]:
        """Stacks of all workers, side by side; what is not there in time is said to be missing."""
        processes = dict(self._processes())
        # Not a pool: the process could not exit while one of its threads hangs.
        futures = {name: self._submit(name, pid) for name, pid in processes.items()}
        wait_for_futures(futures.values(), timeout=STACKS_TIMEOUT_S + 1)
        return {name: _text_of(future) for name, future in futures.items()}

    def _submit(self, name: str, pid: int) -> Future[str]:
        thread = CallThread(f"stack-{name}")
        stack = thread.submit(self._stack, name, pid)
        thread.close()
        return stack

    def _stack(self, name: str, pid: int) -> str:
        try:
            return run_py_spy(pid, [], timeout_s=STACKS_TIMEOUT_S)
        except CannotExamineError as error:
            return f"{error}\n\n{self._stack_by_signal(name, pid)}"

    def _stack_by_signal(self, name: str, pid: int) -> str:
        """Where py-spy is not permitted: workers print their stacks on SIGUSR1, to their log."""
        log = self._folder / "logs" / f"{name}.log"
        try:
            before = log.stat().st_size
            os.kill(pid, signal.SIGUSR1)
            threading.Event().wait(0.5)
            with log.open("rb") as file:
                file.seek(before)
                return file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            return f"no stack by signal either: {error}"

    def _last_events(self) -> str:
        path = self._folder / "events.jsonl"
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_NUM_EVENTS:]) + "\n"


def _text_of(stack: Future[str]) -> str:
    if not stack.done():
        return "no answer in time"
    error = stack.exception()
    return stack.result() if error is None else f"{type(error).__name__}: {error}"


def own_stacks() -> str:
    """The stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  # the only way
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )


def _summary(stall: Stall, now_s: float) -> str:
    lines = [stall.sentence() + ".", "", "Waits, oldest first:"]
    lines += [f"  {wait.describe(now_s)}" for wait in stall.waits] or ["  none"]
    if stall.cycle:
        lines += ["", "A closed circle, which cannot end by itself:"]
        lines += [f"  {wait.describe(now_s)}" for wait in stall.cycle]
    return "\n".join(lines)
