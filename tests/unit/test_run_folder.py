import io
import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from freewheel.config import Config, load_config
from freewheel.errors import ConfigError, RecordError
from freewheel.files import dump_json, write_atomic
from freewheel.run_folder import RunClock, RunFolder, resolve_run_dir
from freewheel.status import RunningValidation, RunStatus, ScoredValidation, Wait
from tests.unit.disk_crashes import Disk, disk_full


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Config())
    yield folder
    folder.close()


def write_lines(folder, name, count, tail=""):
    text = "".join(f'{{"row": {i}}}\n' for i in range(count)) + tail
    folder.rows_path(name).write_text(text)


def test_created_folder_holds_the_resolved_configuration(folder):
    assert folder.read_config() == Config()
    assert folder.num_rows() == {"metrics": 0, "validations": 0, "samples": 0, "events": 0}
    assert folder.read_summary() is None
    assert folder.read_status() is None


def test_a_folder_that_holds_a_run_is_refused(folder):
    folder.close()
    with pytest.raises(ConfigError, match="holds a run; resume it"):
        RunFolder.create(folder.path, Config())


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_a_run_cannot_be_resumed(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=name):
        RunFolder.resume(tmp_path / name)


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder.create(tmp_path / "file" / "run", Config())


def test_one_process_at_a_time(folder):
    assert folder.lock_state() == "held"
    with pytest.raises(ConfigError, match=r"is in use by process \d+"):
        RunFolder.resume(folder.path)
    folder.close()
    folder.close()
    assert folder.lock_state() == "free"
    RunFolder.resume(folder.path).close()


def test_a_validation_is_not_resumed(tmp_path):
    target = "/runs/a/checkpoints/step_000040"
    folder = RunFolder.create(tmp_path / "out", Config(), purpose="validate", target=target)
    folder.close()
    again = re.escape(f"freewheel validate {target} --run {folder.path}")
    with pytest.raises(ConfigError, match=f"holds a validation, which is not resumed.*{again}$"):
        RunFolder.resume(folder.path)
    with pytest.raises(ConfigError, match="holds a validation; choose another folder"):
        RunFolder.create(folder.path, Config())
    assert folder.lock_state() == "free"


def test_a_folder_that_says_nothing_of_its_purpose_is_of_training(folder):
    folder.close()
    folder.origin_path.write_text('{"time_origin": 5.0, "host": "a"}\n')
    assert folder.read_origin().purpose == "train"
    RunFolder.resume(folder.path).close()


def test_a_damaged_origin_is_a_named_error(folder):
    folder.close()
    folder.origin_path.write_text("")
    with pytest.raises(RecordError, match=r"origin\.json does not say how the run began"):
        RunFolder.resume(folder.path)


def test_lock_ends_with_the_process(tmp_path):
    code = (
        "import os, sys, pathlib; from freewheel.config import Config; "
        "from freewheel.run_folder import RunFolder; "
        "folder = RunFolder.create(pathlib.Path(sys.argv[1]), Config()); os._exit(9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    run = subprocess.run(command, timeout=60, env=environment)
    assert run.returncode == 9
    RunFolder.resume(tmp_path / "run").close()


def test_cut_back_keeps_the_first_rows_and_moves_the_rest(folder):
    for name in ("metrics", "samples", "events"):
        write_lines(folder, name, 5)
    folder.cut_back({"metrics": 3, "samples": 5})
    assert folder.num_rows() == {"metrics": 3, "validations": 0, "samples": 5, "events": 5}
    aside = folder.path / "superseded" / "metrics.1.jsonl"
    assert aside.read_text() == '{"row": 3}\n{"row": 4}\n'
    write_lines(folder, "metrics", 4)
    folder.cut_back({"metrics": 0, "samples": 5})
    assert folder.rows_path("metrics").read_text() == ""
    assert len((folder.path / "superseded" / "metrics.2.jsonl").read_text().splitlines()) == 4
    assert aside.exists()


def test_cut_back_refuses_when_rows_are_missing(folder):
    write_lines(folder, "samples", 2)
    with pytest.raises(RecordError, match=r"has 2 lines, but the checkpoint knew 3"):
        folder.cut_back({"samples": 3})


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_resume_moves_half_written_lines_and_the_summary_aside(folder, size):
    torn = '{"row": "' + "x" * size
    write_lines(folder, "events", 2, torn)
    write_lines(folder, "metrics", 0, torn)
    folder.write_summary({"status": "stopped"})
    folder.close()
    resumed = RunFolder.resume(folder.path)
    assert folder.read_summary() is not None
    resumed.tidy()
    resumed.close()
    assert folder.num_rows()["events"] == 2
    assert folder.rows_path("events").read_text().endswith("\n")
    assert folder.rows_path("metrics").read_text() == ""
    assert (folder.path / "superseded" / "events.1.jsonl").read_text() == torn
    assert folder.read_summary() is None
    assert (folder.path / "superseded" / "summary.1.json").exists()


def test_summary_and_status_survive_the_round_trip(folder):
    folder.write_summary({"status": "completed", "rollout_idle_ratio": float("nan")})
    assert folder.read_summary() == {"status": "completed", "rollout_idle_ratio": None}
    status = RunStatus(
        phase="running",
        step=3,
        reward_mean=0.5,
        validation=RunningValidation(step=2, version=2, num_done=1, num_total=9),
        last_validation=ScoredValidation(step=1, version=1, score=0.5, ci95=(0.4, 0.6)),
        waits=(Wait(waiter="train", resource="groups", holder="", since_s=1.0),),
    )
    folder.write_status(status)
    last = folder.read_status()
    assert last is not None
    assert last.status == status
    assert RunStatus.from_json(status.to_json()) == status
    assert not [p for p in folder.path.iterdir() if p.name.endswith(".tmp")]


def test_a_broken_summary_is_a_named_error(folder):
    folder.summary_path.write_text("{")
    with pytest.raises(RecordError, match=r"summary\.json is not valid JSON"):
        folder.read_summary()


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \udcff")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_time_goes_on_after_a_resume():
    clock = RunClock(1000.0, wall=lambda: 1000.0, monotonic=lambda: 77.0)
    assert clock.t_s() == 0
    now = [5.0]
    resumed = RunClock(1000.0, wall=lambda: 1060.0, monotonic=lambda: now[0])
    assert resumed.t_s() == 60
    now[0] = 7.5
    assert resumed.t_s() == 62.5
    stamp = resumed.stamp()
    assert stamp == {"t_s": 62.5, "time": "1970-01-01T00:17:40.000+00:00", "monotonic_s": 7.5}
    assert RunClock(1000.0, wall=lambda: 900.0, monotonic=lambda: 1.0).t_s() == 0


def test_time_never_goes_backwards_when_the_wall_clock_was_set_back():
    now = [5.0]
    clock = RunClock(1000.0, at_least_s=300.0, wall=lambda: 900.0, monotonic=lambda: now[0])
    assert clock.t_s() == 300
    now[0] = 7.0
    assert clock.stamp()["t_s"] == 302
    later = RunClock(1000.0, at_least_s=300.0, wall=lambda: 1400.0, monotonic=lambda: 1.0)
    assert later.t_s() == 400


def test_the_folder_takes_a_resume_s_clock_from_its_checkpoint(folder):
    folder.origin_path.write_text(json.dumps({"time_origin": time.time() + 3600}))
    assert folder.clock().t_s() < 1
    assert 500 <= folder.clock(at_least_s=500.0).t_s() < 510


def test_a_relative_folder_is_the_same_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(Path("runs/here"), Config())
    folder.close()
    resumed = RunFolder.resume(Path("runs/here"))
    resumed.close()
    for found in (folder, resumed, RunFolder.look(Path("runs/here"))):
        assert found.path == tmp_path / "runs" / "here"
        assert found.checkpoints_path == tmp_path / "runs" / "here" / "checkpoints"


def test_a_disk_that_takes_nothing_is_a_named_error(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    disk.arm(0)
    RunFolder.create(tmp_path / "whole", Config()).close()
    total = len(disk.trace)
    assert total >= 8
    for fail_at in range(1, total + 1):
        disk.arm(fail_at, disk_full)
        with pytest.raises((ConfigError, RecordError), match=r"cannot be written: No space left"):
            RunFolder.create(tmp_path / str(fail_at), Config())
        disk.arm(0)
        if not (tmp_path / str(fail_at) / "config.yaml").exists():
            # The lock is given back, and nothing is in the way of another try.
            RunFolder.create(tmp_path / str(fail_at), Config()).close()


def test_a_lock_that_cannot_be_written_is_a_named_error(tmp_path, monkeypatch):
    class Full(io.TextIOWrapper):
        def flush(self):
            raise disk_full()

    opened = Path.open

    def open_full(self, *args, **options):
        file = opened(self, *args, **options)
        return Full(file.detach(), encoding="utf-8") if self.name == ".lock" else file

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(RecordError, match=r"\.lock: cannot be written: No space left"):
        RunFolder.create(tmp_path / "run", Config())


def test_logs_that_cannot_be_made_are_a_named_error(folder):
    assert folder.make_logs() == folder.make_logs() == folder.path / "logs"
    (folder.path / "logs").rmdir()
    (folder.path / "logs").write_text("")
    with pytest.raises(RecordError, match="logs: cannot be written"):
        folder.make_logs()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "{",
        '{"status": {}}',
        '{"status": {"phase": "running"}}',
        '{"status": {"phase": 5}, "updated": 1, "pid": 1, "host": "h"}',
        '{"status": {"phase": "running"}, "updated": null, "pid": 1, "host": "h"}',
        b"\xff",
    ],
)
def test_a_status_that_cannot_be_read_is_none(folder, text):
    folder.status_path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert folder.read_status() is None


def test_run_dir_fields_are_filled_in(tmp_path):
    config = load_config(None, ["trainer.experiment_name=toy"])
    found = resolve_run_dir(config, now=datetime(2026, 1, 31, 23, 59, 58))
    assert str(found) == "runs/toy-20260131-235958"


def test_json_takes_what_records_hold():
    import numpy as np

    value = {
        "nan": [float("nan"), float("inf"), 1.5],
        "numpy": np.float32(0.5),
        "array": np.arange(2),
        "numpy_nan": np.float64("nan"),
        "set": {2, 1},
        0: Wait(waiter="a", resource="b", holder="c", since_s=0.0),
        "path": sys.path.__class__,
    }
    read = json.loads(dump_json(value))
    assert read["nan"] == [None, None, 1.5]
    assert read["numpy"] == 0.5
    assert read["array"] == [0, 1]
    assert read["numpy_nan"] is None
    assert read["set"] == [1, 2]
    assert read["0"]["waiter"] == "a"
