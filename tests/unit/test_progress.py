import dataclasses
import io
import threading
import time

import pytest
from rich.console import Console

from freewheel.progress import (
    BackgroundProgress,
    NoProgress,
    PlainRenderer,
    RichRenderer,
    make_progress,
    render_table,
)
from freewheel.progress_text import duration, number
from freewheel.status import RunningValidation, RunStatus, ScoredValidation, Wait

STATUS = RunStatus(
    phase="running",
    step=12,
    total_steps=100,
    policy_version=11,
    groups_running=14,
    groups_ready=3,
    slots_used=17,
    slots_max=24,
    samples_per_s=95.2,
    tokens_per_s=1234.0,
    reward_mean=0.5321,
    staleness_mean=0.4,
    staleness_max=1,
    validation=RunningValidation(step=10, version=10, num_done=31, num_total=64),
    last_validation=ScoredValidation(step=5, version=5, score=0.4, ci95=(0.3, 0.5)),
    last_checkpoint=10,
    trainer_waits_for="2 of 16 groups",
    waits=(
        Wait(waiter="validation", resource="a lease", holder="replica 0", since_s=3.0),
        Wait(waiter="feed", resource="a slot", holder="", since_s=99.0),
    ),
    wall_s=100.0,
    eta_s=185.0,
)

SUMMARY = {
    "status": "failed",
    "exit_code": 4,
    "cause": "no token for 120 s",
    "steps": 12,
    "policy_version": 11,
    "wall_s": 100.0,
    "samples": {"issued": 200, "trained": 190},
    "trainer_wait_s": {"samples": 3.25, "validation": 0.0},
}

SHOWN = [
    "step 12/100, version 11, 3m 05s left",
    "14 groups running, 3 ready, slots 17/24",
    "95.2 samples/s, 1.23k tokens/s",
    "reward 0.532, staleness 0.4 (max 1)",
    "of version 10 running, 31/64 trials",
    "trainer waits for 2 of 16 groups",
    "validation waits for a lease (replica 0), 1m 37s",
]


def plain(*statuses, summary=None):
    stream = io.StringIO()
    renderer = PlainRenderer(stream)
    for status in statuses:
        renderer.draw(status)
    renderer.finish(summary)
    return stream.getvalue().splitlines()


def test_plain_line_tells_everything():
    lines = plain(STATUS)
    assert lines[:3] == [
        "[1m 40s] running",
        "[1m 40s] validation: score 0.400 (95 % 0.300 to 0.500), version 5, step 5",
        "[1m 40s] checkpoint: step 10",
    ]
    assert all(text in lines[3] for text in SHOWN)
    assert "feed waits" not in lines[3], "young waits are the normal course of things"
    assert len(lines) == 4


def test_plain_lines_are_thinned_and_the_last_step_is_never_lost():
    base = RunStatus(phase="running")
    steps = [dataclasses.replace(base, step=i, wall_s=i * 0.5) for i in range(12)]
    lines = [line for line in plain(*steps) if "step" in line]
    assert [line.split("step ")[1].split(",")[0] for line in lines] == ["0", "4", "8", "11"]


def test_plain_says_so_when_nothing_happens_for_long():
    base = RunStatus(phase="running", step=3)
    states = [dataclasses.replace(base, wall_s=float(t)) for t in range(0, 62, 2)]
    assert len([line for line in plain(*states) if "step 3" in line]) == 3


def test_news_come_once_each():
    scored = [
        dataclasses.replace(
            STATUS, wall_s=100.0 + i, last_validation=ScoredValidation(step=5, version=v, score=0.5)
        )
        for i, v in enumerate((5, 5, 6))
    ]
    lines = [line for line in plain(*scored) if "validation: score" in line]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (0.5, "partial: score 0.500, version 5, step 5; 3 of 9 trials: out of time"),
        (None, "partial: no score, version 5, step 5; 3 of 9 trials: out of time"),
    ],
)
def test_a_partial_score_is_called_so(score, text):
    scored = ScoredValidation(
        step=5, version=5, score=score, num_done=3, num_total=9, partial="out of time"
    )
    lines = plain(dataclasses.replace(STATUS, last_validation=scored))
    assert any(line.endswith(f"validation: {text}") for line in lines), lines


def test_dropped_prompts_are_named_once_and_then_counted():
    states = [
        dataclasses.replace(STATUS, num_dropped_prompts=n, dropped_prompts=tuple("ab"[:n]))
        for n in (0, 1, 1, 2, 6, 6, 7, 12)
    ]
    lines = [line.partition("] ")[2] for line in plain(*states) if "dropped" in line]
    assert lines == [
        "dropped, as it cannot be used: a",
        "dropped, as it cannot be used: b",
        "6 prompts dropped so far; events.jsonl names them",
        "12 prompts dropped so far; events.jsonl names them",
    ]


def test_the_end_is_told():
    lines = plain(STATUS, summary=SUMMARY)
    assert lines[-4:] == [
        "failed (exit code 4): no token for 120 s",
        "12 steps in 1m 40s, policy version 11",
        "samples: 200 issued, 190 trained",
        "trainer waited: 3.2 s for samples, 0.0 s for validation",
    ]


def test_live_table_shows_everything():
    console = Console(file=io.StringIO(), width=120)
    console.print(render_table(STATUS))
    text = console.file.getvalue()
    assert all(part in text for part in SHOWN)
    assert "last score 0.400" in text
    assert "step 10" in text
    bar, steps = text.splitlines()[:2]
    assert set(bar.strip()) <= set("━╸╺")
    assert steps.startswith("steps")


def test_live_table_without_anything_yet():
    console = Console(file=io.StringIO(), width=120)
    console.print(render_table(RunStatus(phase="starting")))
    text = console.file.getvalue()
    assert "nothing trained yet" in text
    assert text.count("none yet") == 2


def test_rich_leaves_the_terminal_as_it_was():
    stream = io.StringIO()
    progress = BackgroundProgress(
        RichRenderer(Console(file=stream, force_terminal=True, width=100))
    )
    progress.update(STATUS)
    progress.close(SUMMARY)
    text = stream.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "cursor shown again"
    assert "failed (exit code 4)" in text


def test_auto_takes_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = make_progress("auto", stream=stream)
    progress.update(STATUS)
    progress.close(None)
    assert "step 12/100" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert isinstance(make_progress("none"), NoProgress)


class Stuck(io.StringIO):
    """A terminal that takes nothing until it is released."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def write(self, text):
        self.gate.wait(30)
        return super().write(text)


def test_a_paused_terminal_delays_nobody():
    stream = Stuck()
    progress = make_progress("plain", stream=stream)
    began = time.monotonic()
    for step in range(1000):
        progress.update(dataclasses.replace(STATUS, step=step))
    assert time.monotonic() - began < 2
    progress.close(SUMMARY)
    assert 1.5 < time.monotonic() - began < 6
    stream.gate.set()


def test_a_terminal_that_is_gone_ends_the_display_only():
    stream = io.StringIO()
    stream.close()
    progress = make_progress("plain", stream=stream)
    progress.update(STATUS)
    progress.close(SUMMARY)
    assert not progress._thread.is_alive()
    progress.update(STATUS)
    progress.close(SUMMARY)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.23, "4.2s"), (60, "1m 00s"), (3599.6, "1h 00m"), (7380, "2h 03m"), (1e999, "unknown")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.1234, "0.123"), (95.2, "95.2"), (12345, "12.3k"), (2e6, "2M")]
)
def test_number(value, text):
    assert number(value) == text
