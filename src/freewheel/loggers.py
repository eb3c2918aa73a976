"""Metrics and validation scores for TensorBoard and Weights & Biases.

Both are sinks: called from the loggers' thread alone, so a slow logger delays nothing else.
TensorBoard's files are written through its own record format, without torch.
"""

import hashlib
import importlib
import importlib.util
import os
import socket
import time
from pathlib import Path
from typing import Any

from freewheel.config import Config
from freewheel.config.load import dump_config
from freewheel.errors import ConfigError
from freewheel.logger_thread import Sink
from freewheel.run_folder import RunFolder

_INSTALL = {"wandb": "pip install 'freewheel[wandb]'", "tensorboard": "pip install tensorboard"}

NOT_LOGGED = ("step", "time_s")
"""Members of a metrics row that are an axis, not a metric."""

VALIDATION_MEMBERS = (
    "score",
    "score_lower",
    "score_upper",
    "n_done",
    "n_timeout",
    "policy_version",
)


def check_loggers(config: Config) -> list[str]:
    """What is missing for the loggers that the configuration names; a line each."""
    return [
        f"logging.loggers: {name} is not installed: {_INSTALL[name]}"
        for name in dict.fromkeys(config.logging.loggers)
        if importlib.util.find_spec(name) is None
    ]


def make_sinks(config: Config, folder: RunFolder, *, resumed_step: int | None = None) -> list[Sink]:
    """The loggers that the configuration names.

    Args:
        config: of the run.
        folder: of the run; TensorBoard's files lie in `tensorboard/`.
        resumed_step: trainer step of the checkpoint that the run goes on from; what was logged
            after it is taken back, as far as the logger can.

    Raises:
        ConfigError: a logger is not installed.
    """
    missing = check_loggers(config)
    if missing:
        raise ConfigError("; ".join(missing))
    sinks: list[Sink] = []
    for name in dict.fromkeys(config.logging.loggers):
        if name == "tensorboard":
            sinks.append(TensorBoardSink(folder.path / "tensorboard", resumed_step=resumed_step))
        else:
            sinks.append(WandbSink(config, folder))
    return sinks


def metric_scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics row by name."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in NOT_LOGGED and isinstance(value, int | float)
    }


def validation_scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a validation row, as `val/...`; none when it was skipped."""
    if row.get("status") == "skipped":
        return {}
    values = {name: row.get(name) for name in VALIDATION_MEMBERS}
    values.update(row.get("metrics") or {})
    return {f"val/{k}": float(v) for k, v in values.items() if isinstance(v, int | float)}


class TensorBoardSink:
    """Writes one event file for each start of the run."""

    def __init__(self, folder: Path, *, resumed_step: int | None = None) -> None:
        self._folder = folder
        self._resumed_step = resumed_step
        self._writer: Any = None

    def open(self) -> None:
        """Begin a file; readers drop what older ones hold beyond the resumed step."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(exist_ok=True)
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((self._folder / name).open("wb"))
        self._write(file_version="brain.Event:2")
        if self._resumed_step is not None:
            # TensorBoard drops events at this step and later that lie in earlier files.
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=self._resumed_step + 1, session_log=start)

    def metrics(self, row: dict[str, Any]) -> None:
        """One training step."""
        self._log(int(row["step"]), metric_scalars(row))

    def validation(self, row: dict[str, Any]) -> None:
        """One validation, at the step at which it was due."""
        self._log(int(row["step"]), validation_scalars(row))

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None and not self._writer.closed:
            self._writer.close()

    def _log(self, step: int, scalars: dict[str, float]) -> None:
        if not scalars:
            return
        summary = self._summary.Summary()
        for name, value in scalars.items():
            summary.value.add(tag=name, simple_value=value)
        self._write(step=step, summary=summary)
        self.flush()

    def _write(self, **fields: Any) -> None:
        event = self._event.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())


class WandbSink:
    """One Weights & Biases run for the run folder, the same one after a resume."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._run: Any = None

    def open(self) -> None:
        """Begin the run, or take it up again."""
        import yaml

        wandb: Any = importlib.import_module("wandb")
        identity = f"{self._folder.path.name} {self._folder.clock().time_origin}"
        self._run = wandb.init(
            project=self._config.trainer.project_name,
            name=self._config.trainer.experiment_name,
            id=hashlib.sha256(identity.encode()).hexdigest()[:12],
            resume="allow",
            dir=str(self._folder.path),
            config=yaml.safe_load(dump_config(self._config)),
        )
        # Validations end after the step at which they were due, so wandb's own step will not do.
        self._run.define_metric("trainer/step")
        self._run.define_metric("*", step_metric="trainer/step")

    def metrics(self, row: dict[str, Any]) -> None:
        """One training step."""
        self._run.log({**metric_scalars(row), "trainer/step": row["step"]})

    def validation(self, row: dict[str, Any]) -> None:
        """One validation, at the step at which it was due."""
        scalars = validation_scalars(row)
        if scalars:
            self._run.log({**scalars, "trainer/step": row["step"]})

    def flush(self) -> None:
        """Nothing to do: wandb sends from its own process."""

    def close(self) -> None:
        """End the run at wandb."""
        if self._run is not None:
            self._run.finish()
            self._run = None
