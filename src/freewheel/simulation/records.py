"""Records and checkpoints of a simulated run, in memory; the disk's part of a crash test."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

FILES = ("metrics", "validations", "samples", "events")


class MemoryRecorder:
    """Recorder that keeps rows as JSON lines. `on_event` sees each event as it happens."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.lines: dict[str, list[str]] = {name: [] for name in FILES}
        self._on_event = on_event

    def event(self, name: str, **fields: Any) -> None:
        """Append an event with the loop's time."""
        row = {"t_s": round(asyncio.get_running_loop().time(), 9), "event": name, **fields}
        self._append("events", row)
        if self._on_event is not None:
            self._on_event(row)

    def metrics(self, row: dict[str, Any]) -> None:
        """Append a step's metrics."""
        self._append("metrics", row)

    def validation(self, row: dict[str, Any]) -> None:
        """Append a validation."""
        self._append("validations", row)

    def sample(self, row: dict[str, Any]) -> None:
        """Append a sample."""
        self._append("samples", row)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        self.lines[name].append(json.dumps(row))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Parsed rows of a file."""
        return [json.loads(line) for line in self.lines[name]]

    def num_rows(self) -> dict[str, int]:
        """Rows by file."""
        return {name: len(lines) for name, lines in self.lines.items()}

    async def flush(self) -> None:
        """Nothing to flush."""
        await asyncio.sleep(0)

    def cut_back(self, num_rows: dict[str, int]) -> None:
        """Keep the first rows, as a resume does; events are never cut."""
        for name in ("metrics", "validations", "samples"):
            del self.lines[name][num_rows[name] :]

    def trace(self) -> bytes:
        """Everything recorded, as bytes to compare."""
        return "\n".join(line for name in FILES for line in self.lines[name]).encode()


class MemoryCheckpoints:
    """CheckpointStore that keeps control states as JSON text.

    Attributes:
        before_commit: awaited before each commit; what it raises fails the commit.
    """

    def __init__(self, keep: int) -> None:
        self.before_commit: Callable[[], Awaitable[None]] | None = None
        self.saved: dict[Path, str] = {}
        self.latest: Path | None = None
        self._keep = keep

    async def begin(self, step: int) -> Path:
        """A folder's name."""
        await asyncio.sleep(0)
        return Path(f"/simulated/step_{step:06d}")

    async def commit(self, step: int, control: dict[str, Any]) -> Path:
        """Keep the control state; it must survive JSON."""
        folder = await self.begin(step)
        if self.before_commit is not None:
            await self.before_commit()
        self.saved[folder] = json.dumps(control)
        self.latest = folder
        for old in sorted(self.saved)[: -self._keep]:
            del self.saved[old]
        return folder
