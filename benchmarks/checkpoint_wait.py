"""What the trainer waits for a checkpoint, against one plain copy of model and optimizer in memory.

A real run of a recipe over Ray, with a checkpoint after each of a few steps. Before each checkpoint
the trainer's process times a plain copy of the same tensors, outside of the wait. The wait is what
the run books: `timing_s/save_checkpoint` of `metrics.jsonl`, the call to the process included.

    python benchmarks/checkpoint_wait.py smollm2-arithmetic --steps 6
    python benchmarks/checkpoint_wait.py quickstart --steps 20
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from freewheel.backends.ray.cores import Cores
from freewheel.cli.main import main as freewheel
from freewheel.trainer.core import TrainerCore

TIMES = "FREEWHEEL_COPY_TIMES"


class TimedTrainer(TrainerCore):
    """Times a plain copy of its state after each step."""

    def train_step(self, *args, **kwargs):
        result = super().train_step(*args, **kwargs)
        # Once unmeasured: the first copy pays for fresh memory, as the first checkpoint does.
        times_s = [self._time_copy() for _ in range(2)]
        with Path(os.environ[TIMES]).open("a") as file:
            file.write(json.dumps(min(times_s)) + "\n")
        return result

    def _time_copy(self):
        model, optimizer = self._policy.model, self._updater.optimizer
        began_s = time.perf_counter()
        copies = [tensor.detach().clone() for tensor in model.parameters()]
        for state in optimizer.state.values():
            copies += [state[name].clone() for name in ("exp_avg", "exp_avg_sq") if name in state]
        return time.perf_counter() - began_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("--steps", type=int, default=6)
    args, overrides = parser.parse_known_args()
    here = str(Path(__file__).resolve().parent)
    sys.path.insert(0, here)
    Cores.of = classmethod(lambda _, rollout: Cores(trainer="checkpoint_wait:TimedTrainer"))
    with tempfile.TemporaryDirectory() as folder:
        times, run = Path(folder) / "times.jsonl", Path(folder) / "run"
        os.environ[TIMES] = str(times)
        code = freewheel(
            [
                "train",
                args.recipe,
                f"trainer.run_dir={run}",
                f"trainer.total_training_steps={args.steps}",
                "trainer.save_freq=1",
                "trainer.test_freq=0",
                "trainer.val_before_train=false",
                "trainer.val_at_end=false",
                "logging.progress=none",
                *overrides,
            ]
        )
        if code:
            sys.exit(code)
        copies_s = [json.loads(line) for line in times.read_text().splitlines()]
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        waits_s = [row["timing_s/save_checkpoint"] for row in rows[1:]]
    # The first checkpoint is left out of both: memory that the process never had is slower.
    report(copies_s[1:-1], waits_s[1:])


def report(copies_s, waits_s):
    copy_s, wait_s = statistics.median(copies_s), statistics.median(waits_s)
    print(f"plain copy: median {copy_s:.4f} s ({min(copies_s):.4f} to {max(copies_s):.4f})")
    print(f"wait:       median {wait_s:.4f} s ({min(waits_s):.4f} to {max(waits_s):.4f})")
    print(f"wait / copy: {wait_s / copy_s:.2f}")


if __name__ == "__main__":
    main()
