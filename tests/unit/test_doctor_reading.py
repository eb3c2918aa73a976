"""What the doctor reads: dumps, /proc, source files; and its command line."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from freewheel.cli import doctor as doctor_command
from freewheel.cli.main import main
from freewheel.doctor import CannotExamineError, examine, judge, read_dump
from freewheel.doctor import dump as dump_module
from freewheel.doctor.dump import explain_failure, take_sample
from freewheel.doctor.examine import Sampling
from freewheel.doctor.kernel import parse_stat, parse_syscall
from freewheel.doctor.sources import annotate
from freewheel.doctor.stacks import Frame
from tests.unit.doctor_stacks import process, thread

DUMPS = Path(__file__).parent / "doctor_dumps"


def test_the_known_deadlock_in_a_saved_dump():
    (read,) = read_dump(DUMPS / "known_deadlock.txt")
    assert (read.pid, read.actor, read.method) == (8596, "FullyAsyncRollouter", "do_validate")
    assert [one.name for one in read.last.threads] == [
        "MainThread", "PythonGCThread", "AsyncIO Thread: default", "", "bridge_0",
    ]  # fmt: skip
    (found,) = judge([read]).findings
    assert (found.pattern, found.certainty) == ("deadlock-asyncio-run", "likely")
    assert found.thread == "'AsyncIO Thread: default' (8633)"
    assert str(found.evidence) == "Future.result (concurrent/futures/_base.py:451)"
    assert found.caller.function == "auto_await.<locals>.wrapper"
    assert found.entry.function == "FullyAsyncRollouter.do_validate"


def test_an_idle_actor_in_a_saved_dump():
    assert judge(read_dump(DUMPS / "idle_actor.txt")).findings == ()


def test_several_processes_and_local_variables_in_one_file():
    first, second = read_dump(DUMPS / "two_processes_with_locals.txt")
    assert (first.python_version, first.pid, second.pid) == ("3.12.3", 70, 71)
    assert first.last.threads[0].frames[2].function == "next_request"
    main_thread, other = second.last.threads
    assert (main_thread.active, main_thread.owns_gil) == (True, True)
    assert (other.name, other.thread_id) == ('say \\"hi\\" (twice)', 0x7F4412345678)
    assert [one.pattern for one in judge([first, second]).findings] == ["loop-blocked-queue"]


def test_ranks_in_one_file():
    (found,) = judge(read_dump(DUMPS / "nccl_all_reduce.txt")).findings
    assert (found.pattern, found.pid, found.certainty) == ("collective-waits", 501, "possible")


def test_a_json_dump(tmp_path):
    frame = {"name": "f", "filename": "/app/x.py", "short_filename": "x.py", "line": 3}
    record = {
        "pid": 5, "thread_id": 1, "thread_name": None, "os_thread_id": 5, "active": True,
        "owns_gil": False, "frames": [frame], "process_info": None,
    }  # fmt: skip
    path = tmp_path / "dump.json"
    path.write_text(json.dumps([record]))
    (read,) = read_dump(path)
    assert (read.pid, str(read.last.threads[0].frames[0])) == (5, "f (x.py:3)")


@pytest.mark.parametrize("text", ["", "no dump", "[1, 2]", "[{", '{"a": 1}'])
def test_a_file_that_is_no_dump(tmp_path, text):
    path = tmp_path / "dump"
    path.write_text(text)
    with pytest.raises(CannotExamineError, match="no thread found"):
        read_dump(path)


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            "Permission Denied: Try running again with elevated permissions by going 'sudo ...'",
            ["ptrace_scope", "SYS_PTRACE", "sudo"],
        ),
        ("Error: Operation not permitted (os error 1)", ["SYS_PTRACE"]),
        (
            "Error: Failed ...\n  0: No such file or directory (os error 2)",
            ["there is no process 7"],
        ),
        ("Error: Failed to find python version from target process", ["not a Python process"]),
        ("Error: something new\nmore", ["cannot read process 7: Error: something new"]),
    ],
)
def test_failures_of_py_spy_are_explained(stderr, words):
    text = explain_failure(7, stderr)
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("running", None),
        ("-1 0x7ffe 0x7f42", None),
        ("", None),
        (None, None),
        ("202 0x1 0x189 0x0 0x0 0x0 0xffffffff 0x7ffe 0x7f42", ("futex", None)),
        ("230 0x1 0x0 0x7ffe 0x0 0x0 0x0 0x7ffe 0x7f42", ("sleep", None)),
        ("23 0x0 0x0 0x0 0x0 0x7ffe 0x0 0x7ffe 0x7f42", ("sleep", None)),
        ("23 0x4 0x1 0x0 0x0 0x7ffe 0x0 0x7ffe 0x7f42", ("select", None)),
        ("232 0x6 0x7f42 0x1 0xffffffff 0x0 0x0 0x7f42 0x7f42", ("epoll", True)),
        ("281 0x6 0x7f42 0x1 0xffffffffffffffff 0x0 0x0 0x7f42 0x7f42", ("epoll", True)),
        ("232 0x6 0x7f42 0x1 0x927c0 0x0 0x0 0x7f42 0x7f42", ("epoll", False)),
        ("219 0x6 0x7f42 0x1 0x0 0x0 0x0 0x7f42 0x7f42", ("restarted", None)),
        ("9999 0x6 0x7f42 0x1 0x0 0x0 0x0 0x7f42 0x7f42", ("system call 9999", None)),
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of another architecture")
def test_system_calls(text, expected):
    syscall = parse_syscall(text)
    assert (syscall and (syscall.name, syscall.no_timeout)) == expected


def test_names_with_brackets_in_stat():
    assert parse_stat("12 (a) R (b)) S 1 2 3") == ("a) R (b)", "S")
    assert parse_stat(None) == ("", None)


SOURCE = """\
def work(self):
    with self.lock, open("f") as file:
        first()
        def later():
            second()
        third()
    fourth()
async def other(self):
    async with self.lock:
        fifth()
def take(self):
    with self.lock:
        pass
"""


def test_with_blocks_around_a_line(tmp_path):
    path = tmp_path / "app.py"
    path.write_text(SOURCE)

    def at(line):
        return Frame(function="f", path=str(path), short_path="app.py", line=line)

    held = {}
    for line in (3, 5, 6, 7, 10):
        threads = (
            replace(thread("f (x.py:1)"), frames=(at(12),)),
            replace(thread("f (x.py:1)", number=2), frames=(at(line),)),
        )
        waits, holds = annotate(process(*threads)).last.threads
        assert waits.frames[0].source == "with self.lock:"
        held[line] = holds.frames[0].held
    assert held == {3: ("self.lock",), 5: (), 6: ("self.lock",), 7: (), 10: ()}


def test_a_look_has_a_deadline(tmp_path, monkeypatch):
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(dump_module, "_find_py_spy", lambda: str(slow))
    with pytest.raises(CannotExamineError, match=r"within 0\.2 s"):
        take_sample(os.getpid(), timeout_s=0.2)


def test_a_process_that_a_killed_look_left_stopped_goes_on(tmp_path, monkeypatch):
    slow = tmp_path / "py-spy"
    slow.write_text('#!/bin/sh\nkill -STOP "$3"\nexec sleep 60\n')
    slow.chmod(0o755)
    monkeypatch.setattr(dump_module, "_find_py_spy", lambda: str(slow))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(CannotExamineError):
            take_sample(child.pid, timeout_s=0.5)
        child.communicate(b"end\n", timeout=10)
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait(10)


def test_a_missing_py_spy_is_named(monkeypatch):
    monkeypatch.setattr(dump_module.shutil, "which", lambda *_, **__: None)
    with pytest.raises(CannotExamineError, match="pip install py-spy"):
        take_sample(os.getpid(), timeout_s=1.0)


def test_one_process_that_cannot_be_examined_does_not_hide_another():
    examination = examine([999_999_999], Sampling(num_samples=1))
    assert examination.failures == {999_999_999: "there is no process 999999999"}
    assert examination.processes == ()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["--dump", str(DUMPS / "known_deadlock.txt")],
            1,
            ["LIKELY", "result", "remedy", "async def"],
        ),
        (["--dump", str(DUMPS / "idle_actor.txt")], 0, ["nothing wrong", "no findings"]),
        (["--dump", "/no/such/file"], 2, ["No such file"]),
        ([], 2, ["--pid"]),
        (["--pid", "999999999"], 2, ["there is no process 999999999"]),
        (["--pid", "1", "--dump", "x"], 2, ["--pid"]),
        (["--pid", "1", "--samples", "0"], 2, ["--samples"]),
    ],
)
def test_exit_codes(capsys, arguments, code, words):
    assert main(["doctor", *arguments]) == code
    shown = capsys.readouterr()
    assert all(word in shown.out + shown.err for word in words)


def test_all_ray_examines_what_is_found(capsys, monkeypatch):
    monkeypatch.setattr(doctor_command, "ray_processes", lambda: [999_999_998, 999_999_999])
    assert main(["doctor", "--all-ray", "--pid", "999999999", "--json"]) == 2
    assert list(json.loads(capsys.readouterr().out)["failures"]) == ["999999999", "999999998"]
    monkeypatch.setattr(doctor_command, "ray_processes", list)
    assert main(["doctor", "--all-ray"]) == 2
    assert "no Ray worker or driver" in capsys.readouterr().err


def test_json_output(capsys):
    assert main(["doctor", "--json", "--dump", str(DUMPS / "known_deadlock.txt")]) == 1
    data = json.loads(capsys.readouterr().out)
    (found,) = data["findings"]
    assert found["pattern"] == "deadlock-asyncio-run"
    assert found["evidence"]["line"] == 451
    assert data["processes"][0]["actor"] == "FullyAsyncRollouter"


def test_stacks_can_be_shown(capsys):
    main(["doctor", "--stacks", "--dump", str(DUMPS / "idle_actor.txt")])
    assert "EpollSelector.select (selectors.py:468)" in capsys.readouterr().out
