import os
import subprocess
import sys
import types

import pytest

from freewheel.config import Config, load_config
from freewheel.errors import ConfigError
from freewheel.loggers import TensorBoardSink, check_loggers, make_sinks, validation_scalars
from freewheel.run_folder import RunFolder

METRICS = {"step": 3, "policy_version": 2, "time_s": 9.5, "actor/loss": 0.25, "name": "x"}
VALIDATION = {
    "step": 2,
    "policy_version": 2,
    "status": "partial",
    "score": 0.5,
    "score_lower": 0.4,
    "n_done": 63,
    "metrics": {"mean@4": 0.5, "pass@4": 0.75, "note": "text"},
}


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Config())
    yield folder
    folder.close()


def read_events(path):
    """(step, tag, value) as TensorBoard itself reads the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path), purge_orphaned_data=True)
    accumulator.Reload()
    return [
        (event.step, tag, event.value)
        for tag in accumulator.Tags()["scalars"]
        for event in accumulator.Scalars(tag)
    ]


def test_tensorboard_reads_metrics_and_scores(tmp_path):
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.open()
    sink.metrics(METRICS)
    sink.validation(VALIDATION)
    sink.validation({"step": 4, "status": "skipped", "score": None})
    sink.close()
    sink.close()
    found = read_events(tmp_path / "tensorboard")
    assert (3, "actor/loss", 0.25) in found
    assert (2, "val/score", 0.5) in found
    assert (2, "val/pass@4", 0.75) in found
    assert not {step for step, _, _ in found} - {2, 3}


def test_tensorboard_drops_what_a_resume_took_back(tmp_path):
    for resumed_step, steps, value in ((None, (1, 2, 3), 1.0), (1, (2,), 5.0)):
        sink = TensorBoardSink(tmp_path / "tensorboard", resumed_step=resumed_step)
        sink.open()
        for step in steps:
            sink.metrics({"step": step, "loss": value})
        sink.close()
    assert read_events(tmp_path / "tensorboard") == [(1, "loss", 1.0), (2, "loss", 5.0)]


def test_a_skipped_validation_has_no_numbers():
    assert validation_scalars({"step": 1, "status": "skipped", "n_done": 0, "score": None}) == {}


def test_a_logger_that_is_not_installed_is_named(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config(None, ["logging.loggers=[wandb]"])
    assert check_loggers(config) == [
        "logging.loggers: wandb is not installed: pip install 'freewheel[wandb]'"
    ]
    with pytest.raises(ConfigError, match="wandb is not installed"):
        make_sinks(config, folder)


class FakeRun:
    def __init__(self, **arguments):
        self.arguments, self.logged, self.finished = arguments, [], False

    def define_metric(self, name, step_metric=None):
        self.axis = step_metric

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


def test_wandb_gets_metrics_and_scores_with_their_steps(folder, monkeypatch):
    runs = []

    def init(**arguments):
        runs.append(FakeRun(**arguments))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__=object()))
    config = load_config(None, ["logging.loggers=wandb", "trainer.project_name=p"])
    for _ in range(2):
        (sink,) = make_sinks(config, folder)
        sink.open()
        sink.metrics(METRICS)
        sink.validation(VALIDATION)
        sink.close()
    first, second = runs
    assert first.arguments["id"] == second.arguments["id"], "a resume goes on in the same run"
    assert first.arguments["project"] == "p"
    assert first.arguments["config"]["rollout"]["n"] == 8
    assert first.axis == "trainer/step"
    assert first.logged[0] == {"policy_version": 2.0, "actor/loss": 0.25, "trainer/step": 3}
    assert first.logged[1]["val/score"] == 0.5
    assert first.logged[1]["trainer/step"] == 2
    assert first.finished


def test_logging_needs_no_torch(tmp_path):
    code = (
        "import sys, pathlib; from freewheel.loggers import TensorBoardSink; "
        "sink = TensorBoardSink(pathlib.Path(sys.argv[1]) / 't'); sink.open(); "
        "sink.metrics({'step': 1, 'loss': 1.0}); sink.close(); "
        "print([m for m in ('torch', 'tensorflow', 'ray', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
