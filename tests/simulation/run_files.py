"""A simulated run written down as a run folder, for the audit to read."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from freewheel.config import dump_config
from freewheel.config.sections import Config
from freewheel.simulation.records import FILES
from freewheel.simulation.run import SimRun
from freewheel.simulation.settings import SimSettings


def write_run(config: Config, settings: SimSettings, run: SimRun, folder: Path) -> None:
    """Write what an ended run recorded and saved."""
    folder.mkdir()
    data = {
        "train_files": str(_write_prompts(folder / "train.jsonl", settings.num_prompts)),
        "val_files": str(_write_prompts(folder / "val.jsonl", settings.num_val_prompts)),
    }
    config = replace(config, data=replace(config.data, **data))
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "summary.json").write_text(json.dumps(run.end.summary))
    for name in FILES:
        lines = run.recorder.lines[name]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for path, control in run.checkpoints.saved.items():
        _write_checkpoint(folder / "checkpoints" / path.name, control)
    if run.checkpoints.latest is not None:
        (folder / "checkpoints" / "latest").symlink_to(run.checkpoints.latest.name)


def _write_prompts(path: Path, count: int) -> Path:
    path.write_text('{"prompt": "x"}\n' * count)
    return path


def _write_checkpoint(path: Path, control: str) -> None:
    path.mkdir(parents=True)
    (path / "control.json").write_text(control)
    entry = {"num_bytes": len(control), "sha256": hashlib.sha256(control.encode()).hexdigest()}
    manifest = {"format": 1, "step": int(path.name[5:]), "files": {"control.json": entry}}
    (path / "manifest.json").write_text(json.dumps(manifest))
