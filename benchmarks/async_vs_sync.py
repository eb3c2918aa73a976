"""Seconds a step of the quickstart, asynchronous against strictly on-policy, alternating.

    python benchmarks/async_vs_sync.py [--steps 60] [--repeats 2]

Both run the same recipe on the same engine and trainer; only the staleness settings differ, so what
is compared is the overlap of rollouts, training and validation. A validation is due every ten steps
in both. The on-policy run validates in mode `exclusive`, as systems do that stop for it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODES = {
    "on-policy, validation stops rollouts": [
        "async_training.staleness_threshold=0",
        "async_training.parallel_validate_and_rollout=false",
    ],
    "asynchronous, validation in parallel": [
        "async_training.staleness_threshold=1",
        "async_training.parallel_validate_and_rollout=true",
    ],
}


def run(settings: list[str], steps: int) -> dict[str, float]:
    """One run; seconds a step between its first and its last."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "freewheel", "train", "quickstart"),
            f"trainer.run_dir={run_dir}",
            f"trainer.total_training_steps={steps}",
            "trainer.test_freq=10",
            "trainer.save_freq=0",
            "trainer.val_at_end=false",
            "logging.progress=none",
            "logging.loggers=[]",
            *settings,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((run_dir / "summary.json").read_text())
    elapsed_s = rows[-1]["time_s"] - rows[0]["time_s"]
    samples = summary["samples"]["trained"] / steps * (steps - 1)
    return {
        "s_per_step": elapsed_s / (steps - 1),
        "samples_per_s": samples / elapsed_s,
        "wait_samples": summary["trainer_wait_s"]["samples"],
        "wait_validation": summary["trainer_wait_s"]["validation"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    for _ in range(options.repeats):
        for name, settings in MODES.items():
            results[name].append(run(settings, options.steps))
    print(f"{'':40} {'s/step':>8} {'samples/s':>10} {'wait samples':>13} {'wait valid.':>12}")
    medians = {}
    for name, runs in results.items():
        row = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
        medians[name] = row["s_per_step"]
        print(
            f"{name:40} {row['s_per_step']:8.3f} {row['samples_per_s']:10.1f} "
            f"{row['wait_samples']:13.1f} {row['wait_validation']:12.1f}"
        )
    slow, fast = medians.values()
    ratios = [
        one["s_per_step"] / other["s_per_step"]
        for one, other in zip(*results.values(), strict=True)
    ]
    print(f"ratio {slow / fast:.2f} (each pair: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
