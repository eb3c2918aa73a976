"""Starts the programs of this folder, has them examined by the command line, and ends them."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = Path(__file__).parents[3] / "src"


class Programs:
    """Programs that run until `close`; each has said its first line."""

    def __init__(self):
        self.pids, self.first_lines, self._processes = {}, {}, []

    def start(self, *names_and_arguments, env=None):
        """Start all; each is `(name, script, *arguments)`; wait for the first line of each."""
        started = {}
        for name, script, *arguments in names_and_arguments:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAMS / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                preexec_fn=_be_nice,
            )
            self._processes.append(process)
            self.pids[name], started[name] = process.pid, process
        for name, process in started.items():
            self.first_lines[name] = _first_line(name, process, limit_s=90)

    def close(self):
        """End every program and its children, by pid."""
        family = [psutil.Process(process.pid) for process in self._processes]
        family += [child for one in list(family) for child in one.children(recursive=True)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process in self._processes:
            process.wait(10)
            process.stdin.close()
            process.stdout.close()


def doctor(*arguments, limit_s=60):
    """The exit code and the JSON report of `freewheel doctor`."""
    done = subprocess.run(
        [sys.executable, "-m", "freewheel", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def settle(seconds=0.5):
    """Give programs that said they are ready the time to get stuck."""
    time.sleep(seconds)  # noqa: TID251  # a stuck program tells nobody


def _be_nice():
    os.nice(5)


def _first_line(name, process, *, limit_s):
    lines = queue.Queue()
    threading.Thread(
        target=lambda: lines.put(process.stdout.readline()), name=f"read-{name}", daemon=True
    ).start()
    line = lines.get(timeout=limit_s)
    assert line, f"{name} ended with {process.wait(10)}"
    return line
