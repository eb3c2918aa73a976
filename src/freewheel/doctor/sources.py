"""Adds what the source files say to frames: the line's text, and the `with` blocks around it.

A file is read through the examined process's own root folder, so that a process in a container
is read right too. A file that was changed since the process started can mislead: what rests on
the text alone is never called certain.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path

from freewheel.doctor.stacks import Frame, Origin, Process, Thread

_MAX_BYTES = 2_000_000
_TAKES_LOCK = re.compile(r"\.acquire\(|^with\s")


def annotate(process: Process) -> Process:
    """The process with source texts in the frames of its newest sample."""
    reader = _Reader(process.pid)
    threads = tuple(_with_texts(thread, reader) for thread in process.last.threads)
    if any(takes_lock(thread) for thread in threads):
        threads = tuple(_with_blocks(thread, reader) for thread in threads)
    last = replace(process.last, threads=threads)
    return replace(process, samples=(*process.samples[:-1], last))


def takes_lock(thread: Thread) -> bool:
    """Whether the text of its innermost line acquires something, in code that is not Python's."""
    if not thread.frames or thread.frames[0].origin is Origin.STDLIB:
        return False
    return bool(_TAKES_LOCK.search(thread.frames[0].source or ""))


def lock_expressions(source: str) -> tuple[str, ...]:
    """What a line like `with self.lock, other:` or `self.lock.acquire()` acquires."""
    if match := re.search(r"([\w.\[\]'\"]+)\.acquire\(", source):
        return (match[1],)
    try:
        tree = ast.parse(f"{source.rstrip().removesuffix(':')}: pass" if source else "")
    except SyntaxError:
        return ()
    return tuple(
        text for node in ast.walk(tree) if isinstance(node, ast.With) for text in _held_by(node)
    )


class _Reader:
    """Files of one process, each read and parsed once."""

    def __init__(self, pid: int) -> None:
        self._root = Path(f"/proc/{pid}/root")
        self._texts: dict[str, str] = {}
        self._blocks: dict[str, list[tuple[int, int, str]]] = {}

    def line(self, frame: Frame) -> str | None:
        lines = self._text(frame.path).splitlines()
        return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else None

    def held(self, frame: Frame) -> tuple[str, ...]:
        if frame.path not in self._blocks:
            self._blocks[frame.path] = _with_ranges(self._text(frame.path))
        blocks = self._blocks[frame.path]
        return tuple(text for first, last, text in blocks if first <= frame.line <= last)

    def _text(self, path: str) -> str:
        if path not in self._texts:
            self._texts[path] = self._read(path) if path.startswith("/") else ""
        return self._texts[path]

    def _read(self, path: str) -> str:
        for candidate in (Path(f"{self._root}{path}"), Path(path)):
            try:
                if candidate.stat().st_size <= _MAX_BYTES:
                    return candidate.read_text(encoding="utf-8", errors="replace")
            except (OSError, ValueError):
                continue
        return ""


def _with_texts(thread: Thread, reader: _Reader) -> Thread:
    frames = tuple(
        frame
        if frame.origin is Origin.STDLIB or frame.native
        else replace(frame, source=reader.line(frame))
        for frame in thread.frames
    )
    return replace(thread, frames=frames)


def _with_blocks(thread: Thread, reader: _Reader) -> Thread:
    frames = tuple(
        replace(frame, held=reader.held(frame)) if frame.origin is Origin.USER else frame
        for frame in thread.frames
    )
    return replace(thread, frames=frames)


def _with_ranges(text: str) -> list[tuple[int, int, str]]:
    """First line, last line and expression of the body of every `with` block."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    found: list[tuple[int, int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
            inner = [
                (child.lineno, child.end_lineno or child.lineno)
                for child in ast.walk(node)
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            ]
            for low, high in _without(first, last, inner):
                found += [(low, high, expression) for expression in _held_by(node)]
    return found


def _without(first: int, last: int, inner: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The lines from first to last less those of functions defined there: they run later."""
    ranges: list[tuple[int, int]] = []
    for low, high in sorted(inner):
        if low > first:
            ranges.append((first, low - 1))
        first = max(first, high + 1)
    return [*ranges, (first, last)] if first <= last else ranges


def _held_by(node: ast.With) -> list[str]:
    """Expressions without a call: a call makes a new object, which no one else can hold."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    return [
        ast.unparse(item.context_expr)
        for item in node.items
        if isinstance(item.context_expr, kinds)
    ]
