"""A control state as the controller writes it, for tests of checkpoint folders."""

from pathlib import Path
from typing import Any

from freewheel.checkpoint import CONTROL_FORMAT
from freewheel.config import Config
from freewheel.control.run_state import structure


def control_state(step: int, **changes: Any) -> dict[str, Any]:
    """Of a run of one group that is finished and not yet trained."""
    outcome = {
        "sample_id": "7-0",
        "attempt": 1,
        "failure": None,
        "message": "",
        "reward": 1.0,
        "num_prompt_tokens": 3,
        "num_response_tokens": 4,
        "version_spans": [[step, 4]],
    }
    group = {
        "group_id": 7,
        "epoch": 0,
        "prompt_index": 3,
        "num_prompt_tokens": 3,
        "start_version": step,
        "max_staleness": 1,
        "ready": True,
        "attempts": [1],
        "outcomes": {"0": outcome},
        "times_s": {"0": [1.0, 2.0]},
    }
    state = {
        "format": CONTROL_FORMAT,
        "structure": structure(Config()),
        "data_fingerprint": "train",
        "val_data_fingerprint": None,
        "train": {
            "step": step,
            "version": step,
            "steps_since_publish": 0,
            "validation_requested_at": -1,
            "wait_s": {"samples": 0.5},
        },
        "ledger": {
            "next_group_id": 8,
            "num_trained_groups": 7,
            "issued": 8,
            "fates": {"trained": 7},
            "failures": {},
            "prompt_failures": {"3": 1},
            "dropped_prompts": [],
            "open": [group],
        },
        "staleness": {"0": 0, str(step): 7},
        "validations": [],
        "held_versions": [],
        "num_rows": {"metrics": step, "validations": 0, "samples": 4 * step},
        "num_validations": 0,
        "checkpoints": [],
        "run_s": 12.0,
        "busy_s": [3.0, 4.0],
    }
    return {**state, **changes}


def write_trainer_part(folder: Path, *, leave_out: tuple[str, ...] = ()) -> None:
    """The files that a checkpoint has to have of the trainer, by name, all but empty."""
    empty = (2).to_bytes(8, "little") + b"{}"
    contents = {
        "hf/config.json": b"{}",
        "hf/model.safetensors": empty,
        "trainer/optimizer.safetensors": empty,
        "trainer/state.json": b"{}",
        "trajectories.parquet": b"",
    }
    for name, content in contents.items():
        path = folder / name
        if name not in leave_out and not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
