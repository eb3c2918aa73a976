"""Findings as text for a person, and as plain data for JSON."""

import textwrap
from dataclasses import asdict
from typing import Any

from freewheel.doctor.examine import Examination
from freewheel.doctor.findings import Finding
from freewheel.doctor.stacks import Frame, Process

_WIDTH = 96
_INDENT = " " * 14


def as_text(examination: Examination, *, stacks: bool = False) -> str:
    """The report: one block a process, its findings in it, a last line that sums up."""
    blocks = [
        "\n".join(_process_lines(process, examination.of(process.pid), stacks=stacks))
        for process in examination.processes
    ]
    blocks += [
        f"pid {pid}: cannot examine\n{textwrap.indent(reason, '  ')}"
        for pid, reason in examination.failures.items()
    ]
    return "\n\n".join([*blocks, _summary(examination)]) + "\n"


def as_data(examination: Examination) -> dict[str, Any]:
    """The report as plain data: `processes`, `findings`, `failures`."""
    return {
        "processes": [
            {
                "pid": process.pid,
                "command": process.command,
                "actor": process.actor,
                "num_threads": len(process.last.threads),
                "num_samples": len(process.samples),
                "seconds": round(process.seconds, 3),
                "num_findings": len(examination.of(process.pid)),
            }
            for process in examination.processes
        ],
        "findings": [_finding_data(finding) for finding in examination.findings],
        "failures": {str(pid): reason for pid, reason in examination.failures.items()},
    }


def _process_lines(process: Process, findings: list[Finding], *, stacks: bool) -> list[str]:
    verdict = "nothing wrong" if not findings else f"{len(findings)} found"
    lines = [f"{process.label}: {verdict}"]
    for finding in findings:
        lines += ["", *_finding_lines(finding)]
    if stacks:
        lines += ["", *_stack_lines(process)]
    return lines


def _finding_lines(finding: Finding) -> list[str]:
    lines = _wrapped(f"  {finding.certainty.upper():<10}", finding.title)
    for name, frame in (
        ("evidence", finding.evidence),
        ("called by", finding.caller),
        ("from", finding.entry),
        ("held at", finding.holder),
    ):
        if frame is not None and (name == "evidence" or frame != finding.evidence):
            lines += _wrapped(f"    {name}", _frame_text(frame))
    if finding.thread is not None:
        lines += _wrapped("    thread", finding.thread)
    lines += _wrapped("    why", finding.why)
    lines += _wrapped("    remedy", finding.remedy)
    return [*lines, *_wrapped("    pattern", finding.pattern)]


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{head:<14}",
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _frame_text(frame: Frame) -> str:
    place = str(frame)
    return f"{place}: {frame.source}" if frame.source else place


def _stack_lines(process: Process) -> list[str]:
    lines: list[str] = []
    for thread in process.last.threads:
        state = "running" if thread.active else "waiting"
        lines.append(f"  thread {thread.label}, {state}{', has the GIL' * thread.owns_gil}")
        lines += [f"      {frame}" for frame in thread.frames]
    return lines


def _finding_data(finding: Finding) -> dict[str, Any]:
    data = asdict(finding)
    for name in ("evidence", "caller", "entry", "holder"):
        frame: Frame | None = getattr(finding, name)
        data[name] = None if frame is None else _frame_data(frame)
    return data


def _frame_data(frame: Frame) -> dict[str, Any]:
    return {
        "function": frame.function,
        "file": frame.path,
        "line": frame.line,
        "source": frame.source,
    }


def _summary(examination: Examination) -> str:
    looked, found = len(examination.processes), len(examination.findings)
    failed = f", {len(examination.failures)} could not be" if examination.failures else ""
    return (
        f"{looked} process{'es' * (looked != 1)} examined{failed}: "
        f"{found or 'no'} finding{'s' * (found != 1)}"
    )
