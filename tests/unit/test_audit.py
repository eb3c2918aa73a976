"""The audit finds nothing in a sound run folder, and each broken promise in one that is not.

The folder is made by hand: 7 prompts, 2 epochs, groups of 2, 2 groups a step, a version every 2
steps, at most 6 groups open. Groups 0 to 10 are trained (the last step is a short one), 11 failed,
12 was set aside, 13 dropped as over-long.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests import audit as audit_module
from tests.audit import audit, examine, main

PROMPTS, TRAINED_GROUPS, STEPS = 7, 11, 6


def make_config(data: Path) -> dict:
    return {
        "data": {
            "train_files": str(data),
            "val_files": [str(data)],
            "train_max_samples": PROMPTS,
            "val_max_samples": 3,
        },
        "rollout": {"n": 2, "min_group_size": 0, "environment": "single_turn"},
        "actor": {"ppo_mini_batch_size": 2},
        "async_training": {
            "require_batches": 1,
            "trigger_parameter_sync_step": 2,
            "staleness_threshold": 0.5,
            "max_staleness": None,
            "partial_rollout": True,
        },
        "validation": {"n": 2},
        "trainer": {
            "total_training_steps": None,
            "total_epochs": 2,
            "test_freq": 2,
            "save_freq": 4,
            "val_before_train": True,
            "val_at_end": True,
        },
        "checkpoint": {"keep": 2},
    }


def make_sample(group: int, index: int) -> dict:
    row = {
        "sample_id": f"{group}-{index}",
        "group_id": group,
        "epoch": group // PROMPTS,
        "prompt_index": (3 * group + group // PROMPTS) % PROMPTS,
        "attempt": 1,
        "status": "trained",
        "failure": None,
        "message": "",
        "reward": float(index),
        "num_prompt_tokens": 5,
        "num_response_tokens": 9,
        "version_spans": [[group // 4, 9]],
        "started_s": 10.0 * (group // 2) + 1,
        "ended_s": 10.0 * (group // 2) + 5,
        "trained_step": 1 + group // 2,
    }
    if group < TRAINED_GROUPS:
        return row
    nothing = {"reward": None, "num_response_tokens": 0, "version_spans": [], "trained_step": None}
    if group == 11:
        return {**row, **nothing, "status": "failed", "failure": "timeout", "message": "20 s"}
    if group == 12:
        return {**row, **nothing, "status": "set_aside", "attempt": 0}
    return {**row, **nothing, "status": "filtered", "attempt": 0, "failure": "over_long_prompt"}


def make_validation(step: int) -> dict:
    version = step // 2
    row = {
        "step": step,
        "policy_version": version,
        "mode": "parallel",
        "status": "complete",
        "reason": "",
        "n_total": 6,
        "n_done": 6,
        "n_failed": {},
        "n_timeout": 0,
        "score": 0.5,
        "score_lower": 0.5,
        "score_upper": 0.5,
        "ci95": [0.1, 0.9],
        "metrics": {"mean@2": 0.5},
        "started_s": 10.0 * step,
        "ended_s": 10.0 * step + 3,
        "response_versions": {str(version): 6},
    }
    if step == 2:
        partial = {"status": "partial", "reason": "late", "n_done": 4, "n_timeout": 1}
        missing = {"n_failed": {"reward": 1}, "score_lower": 0.3, "score_upper": 0.7}
        return {**row, **partial, **missing, "response_versions": {"1": 4}}
    if step == 4:
        nothing = {"n_total": 0, "n_done": 0, "response_versions": {}, "ci95": None}
        scores = {"score": None, "score_lower": None, "score_upper": None}
        return {**row, **nothing, **scores, "status": "skipped", "reason": "another ran"}
    return row


def make_metrics(step: int) -> dict:
    place = {"step": step, "policy_version": (step - 1) // 2, "time_s": 10.0 * step}
    return {**place, "critic/rewards/mean": 0.5}


def make_summary() -> dict:
    counts = {"issued": 28, "trained": 22, "filtered": 2, "failed": 2, "set_aside": 2, "open": 0}
    return {
        "status": "completed",
        "exit_code": 0,
        "cause": "",
        "steps": STEPS,
        "policy_version": 3,
        "samples": counts,
        "failures": {"timeout": 2, "over_long_prompt": 2},
        "late_results": 0,
        "wall_s": 70.0,
        "trainer_wait_s": {"samples": 1.0, "validation": 0, "checkpoint": 0, "sync": 0},
        "rollout_idle_ratio": 0.1,
        "validations": 4,
        "checkpoints": [4, 6],
        "restarts": 0,
    }


def make_checkpoint(folder: Path, step: int, *, num_samples: int, open_groups: list[int]) -> None:
    path = folder / "checkpoints" / f"step_{step:06d}"
    (path / "hf").mkdir(parents=True)
    (path / "hf" / "model.safetensors").write_bytes(b"weights")
    ledger = {
        "next_group_id": num_samples // 2 + len(open_groups),
        "open": [{"group_id": group} for group in open_groups],
    }
    rows = {"metrics": step, "samples": num_samples}
    control = {"train": {"step": step}, "ledger": ledger, "num_rows": rows}
    (path / "control.json").write_text(json.dumps(control))
    seal(path, step)


def seal(path: Path, step: int) -> None:
    files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    listed = {
        file.relative_to(path).as_posix(): {
            "num_bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in files
    }
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": step, "files": listed}))


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1="}\n\n' * (PROMPTS + 3))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(make_config(data)))
    samples = [make_sample(group, index) for group in range(2 * PROMPTS) for index in range(2)]
    write_rows(run / "samples.jsonl", samples)
    write_rows(run / "metrics.jsonl", [make_metrics(step) for step in range(1, STEPS + 1)])
    write_rows(run / "validations.jsonl", [make_validation(step) for step in (0, 2, 4, 6)])
    write_rows(run / "events.jsonl", [{"event": "run_started", "t_s": 0.1}])
    (run / "summary.json").write_text(json.dumps(make_summary()))
    make_checkpoint(run, 4, num_samples=16, open_groups=[8, 9])
    make_checkpoint(run, 6, num_samples=28, open_groups=[])
    (run / "checkpoints" / "latest").symlink_to("step_000006")
    return run


def rows_edited(name, number, **changes):
    """Change fields of one line (from 1)."""

    def edit(run):
        path = run / f"{name}.jsonl"
        rows = read_rows(path)
        rows[number - 1].update(changes)
        write_rows(path, rows)

    return edit


def group_edited(group, **changes):
    def edit(run):
        path = run / "samples.jsonl"
        rows = read_rows(path)
        for row in rows:
            if row["group_id"] == group:
                row.update(changes)
        write_rows(path, rows)

    return edit


def rows_kept(name, keep):
    def edit(run):
        path = run / f"{name}.jsonl"
        write_rows(path, [row for row in read_rows(path) if keep(row)])

    return edit


def row_repeated(name, number):
    def edit(run):
        path = run / f"{name}.jsonl"
        rows = read_rows(path)
        write_rows(path, [*rows, rows[number - 1]])

    return edit


def field_removed(name, number, key):
    def edit(run):
        path = run / f"{name}.jsonl"
        rows = read_rows(path)
        del rows[number - 1][key]
        write_rows(path, rows)

    return edit


def summary_edited(**changes):
    def edit(run):
        path = run / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def counts_edited(**changes):
    return summary_edited(samples={**make_summary()["samples"], **changes})


def config_edited(section, **changes):
    def edit(run):
        path = run / "config.yaml"
        config = yaml.safe_load(path.read_text())
        config[section].update(changes)
        path.write_text(yaml.safe_dump(config))

    return edit


def control_edited(step, **ledger):
    def edit(run):
        path = run / "checkpoints" / f"step_{step:06d}"
        control = json.loads((path / "control.json").read_text())
        control["ledger"].update(ledger)
        (path / "control.json").write_text(json.dumps(control))
        seal(path, step)

    return edit


def num_rows_edited(step, **num_rows):
    def edit(run):
        path = run / "checkpoints" / f"step_{step:06d}"
        control = json.loads((path / "control.json").read_text())
        control["num_rows"].update(num_rows)
        (path / "control.json").write_text(json.dumps(control))
        seal(path, step)

    return edit


def prompt_swapped(run):
    """Group 8 is of the prompt of group 7, and the prompt of group 8 has none."""
    group_edited(8, prompt_index=make_sample(7, 0)["prompt_index"])(run)


def groups_of_an_epoch_renumbered(run):
    group_edited(3, epoch=1)(run)


def weights_flipped(run):
    (run / "checkpoints/step_000004/hf/model.safetensors").write_bytes(b"weightz")


def weights_cut(run):
    (run / "checkpoints/step_000004/hf/model.safetensors").write_bytes(b"weig")


def file_missing(run):
    (run / "checkpoints/step_000006/hf/model.safetensors").unlink()


def file_added(run):
    (run / "checkpoints/step_000006/hf/other.bin").write_bytes(b"x")


def manifest_missing(run):
    (run / "checkpoints/step_000006/manifest.json").unlink()


def manifest_of_another_step(run):
    seal(run / "checkpoints/step_000006", 5)


def latest_dangling(run):
    (run / "checkpoints/latest").unlink()
    (run / "checkpoints/latest").symlink_to("step_000008")


def latest_old(run):
    (run / "checkpoints/latest").unlink()
    (run / "checkpoints/latest").symlink_to("step_000004")


def latest_missing(run):
    (run / "checkpoints/latest").unlink()


def newest_removed(run):
    shutil.rmtree(run / "checkpoints/step_000006")
    latest_old(run)


def half_written_left(run):
    (run / "checkpoints/.writing-step_000006").mkdir()


def torn_line(run):
    path = run / "samples.jsonl"
    path.write_text(path.read_text()[:-20])


def row_is_a_list(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + "[1]\n")


BREAKS = {
    # samples
    "an id twice": (row_repeated("samples", 3), "samples.jsonl:29: sample 1-0 again, first in l"),
    "a foreign id": (rows_edited("samples", 1, sample_id="5-9"), "samples.jsonl:1: sample 5-9: is"),
    "a field missing": (field_removed("samples", 2, "reward"), "samples.jsonl:2: no field reward"),
    "a field of another type": (rows_edited("samples", 2, epoch="0"), ":2: epoch is '0'"),
    "a field too many": (rows_edited("samples", 2, lag=1), ":2: field lag is not in the contract"),
    "a torn line": (torn_line, "samples.jsonl:28: the last line is not whole"),
    "an unknown status": (rows_edited("samples", 1, status="lost"), "unknown status 'lost'"),
    "an unknown class": (rows_edited("samples", 23, failure="odd"), "unknown class of failure"),
    "ended before it started": (rows_edited("samples", 1, ended_s=0.5), "before it started"),
    "tokens without a version": (rows_edited("samples", 1, num_response_tokens=10), "hold 9 tok"),
    "versions fall": (rows_edited("samples", 9, version_spans=[[1, 4], [0, 5]]), "do not rise"),
    "no pairs": (rows_edited("samples", 9, version_spans=[[1, 4, 5]]), "are no pairs"),
    "partial though it is off": (
        lambda run: (
            config_edited("async_training", partial_rollout=False)(run),
            rows_edited("samples", 9, version_spans=[[0, 4], [1, 5]])(run),
        ),
        "but partial_rollout is off",
    ),
    "trained with a failure": (rows_edited("samples", 1, failure="engine"), "trained with failure"),
    "trained without a reward": (rows_edited("samples", 1, reward=None), "without reward or tok"),
    "trained in no step": (group_edited(0, trained_step=None), "trained in no step"),
    "trained in attempt 0": (rows_edited("samples", 1, attempt=0), "trained in attempt 0"),
    "failed without a class": (rows_edited("samples", 23, failure=None), "failed without a class"),
    "filtered by a lost worker": (
        rows_edited("samples", 27, failure="lost_worker"),
        "filtered with failure lost_worker",
    ),
    "filtered and trained": (group_edited(13, trained_step=6), "filtered, but trained in step 6"),
    # groups
    "a sample missing": (rows_kept("samples", lambda r: r["sample_id"] != "4-1"), "1 samples, 2 w"),
    "a group in two steps": (
        rows_edited("samples", 1, trained_step=2),
        "trained in steps ['1', '2']",
    ),
    "a group of two prompts": (rows_edited("samples", 1, prompt_index=2), "prompt_index differs"),
    "two fates": (rows_edited("samples", 25, status="filtered"), "fates ['filtered', 'set_aside']"),
    "too few members": (
        rows_edited("samples", 2, status="failed", failure="engine"),
        "trained with 1 members, at least 2",
    ),
    "failed and trained": (group_edited(11, trained_step=6), "failed, but trained in step 6"),
    "a prompt twice": (prompt_swapped, "group 8 is of prompt"),
    "a prompt not at all": (prompt_swapped, "epoch 1: no group of prompts"),
    "a prompt that there is not": (group_edited(8, prompt_index=7), "group 8: prompt 7 of 7"),
    "a wrong epoch": (groups_of_an_epoch_renumbered, "group 3 of epochs of 7 prompts in 1"),
    "a group missing": (
        rows_kept("samples", lambda row: row["group_id"] != 12),
        "14 groups issued and 0 open, but no line of groups [12]",
    ),
    "a group too many": (counts_edited(issued=26), "group 13, but only 13 were issued"),
    "an epoch too few": (config_edited("trainer", total_epochs=3), "2 complete epochs, 3 wanted"),
    # steps
    "a step twice": (row_repeated("metrics", 6), "metrics.jsonl:7: step 6, step 7 wanted"),
    "a step missing": (
        rows_kept("metrics", lambda row: row["step"] != 3),
        "metrics.jsonl:3: step 4, step 3 wanted",
    ),
    "trained in an unknown step": (
        rows_kept("metrics", lambda row: row["step"] != 3),
        "samples.jsonl:9: trained in step 3, which metrics.jsonl does not have",
    ),
    "a version too many": (rows_edited("metrics", 2, policy_version=1), "step 2 under version 1"),
    "time goes back": (rows_edited("metrics", 2, time_s=5.0), "at 5.0 s, the step before at 10.0"),
    "a row that is no object": (row_is_a_list, "metrics.jsonl:7: is no object"),
    "groups in another step": (group_edited(4, trained_step=2), "step 2: 3 groups trained, 2 wan"),
    "a short step amid others": (group_edited(4, trained_step=2), "step 3: 1 groups trained, 2 w"),
    "another mean reward": (rows_edited("samples", 1, reward=1.0), "critic/rewards/mean 0.5"),
    "too stale": (rows_edited("samples", 17, version_spans=[[0, 9]]), "sample 8-0: 2 versions old"),
    "from the future": (
        rows_edited("samples", 1, version_spans=[[1, 9]]),
        "of version 1 in a step",
    ),
    "stale though on-policy": (
        lambda run: (
            config_edited("async_training", staleness_threshold=0)(run),
            rows_edited("samples", 9, version_spans=[[0, 9]])(run),
        ),
        "sample 4-0: 1 versions old in step 3 (version 1), at most 0 allowed",
    ),
    "too many open": (
        lambda run: [group_edited(group, started_s=2.0)(run) for group in range(3, 8)],
        "7 groups open at 2.000002 s, at most 6 allowed",
    ),
    # summary
    "other counts": (counts_edited(trained=21), "samples.trained is 21, samples.jsonl has 22"),
    "issued does not add up": (counts_edited(issued=30), "issued is 30, ended or open are 28"),
    "other failures": (summary_edited(failures={}), "failures are {}, samples.jsonl has"),
    "other steps": (summary_edited(steps=7), "steps is 7, metrics.jsonl has 6"),
    "another version": (summary_edited(policy_version=2), "policy_version is 2 after 6 steps"),
    "other validations": (summary_edited(validations=3), "validations is 3, the file has 4"),
    "another exit code": (summary_edited(exit_code=1), "status completed with exit code 1"),
    "completed too early": (
        config_edited("trainer", total_training_steps=9),
        "completed after 6 steps, 9 wanted",
    ),
    "completed with open groups": (counts_edited(issued=30, open=2), "but 2 samples are open"),
    "a field of the summary": (
        lambda run: (run / "summary.json").write_text('{"status": "completed"}'),
        "summary.json: no field steps",
    ),
    "no summary": (lambda run: (run / "summary.json").unlink(), "has the run ended?"),
    # validations
    "a validation missing": (
        rows_kept("validations", lambda r: r["step"] != 4),
        "no row of step 4",
    ),
    "the first one missing": (rows_kept("validations", lambda r: r["step"]), "no row of step 0"),
    "two rows of a step": (row_repeated("validations", 1), "2 rows of step 0"),
    "a row that was not due": (rows_edited("validations", 3, step=3), "none was due at step 3"),
    "an older version": (
        rows_edited("validations", 4, policy_version=2, response_versions={"2": 6}),
        "step 6: of version 2, [3] wanted",
    ),
    "two versions": (
        rows_edited("validations", 1, response_versions={"0": 5, "1": 1}),
        "step 0: response_versions",
    ),
    "n_total does not add up": (rows_edited("validations", 2, n_timeout=0), "n_total 6 is not 4"),
    "trials not counted": (
        rows_edited("validations", 1, n_total=5, n_done=5, response_versions={"0": 5}),
        "n_total 5, 6 wanted",
    ),
    "complete with some missing": (
        rows_edited("validations", 2, status="complete", reason=""),
        "complete with 4 of 6 done",
    ),
    "partial without a reason": (
        rows_edited("validations", 2, reason=""),
        "partial with reason ''",
    ),
    "an unknown end": (rows_edited("validations", 2, status="odd"), "unknown status 'odd'"),
    "a score without trials": (rows_edited("validations", 3, score=0.5), "score 0.5 with 0 done"),
    "a score out of its bounds": (rows_edited("validations", 2, score=0.9), "is not between"),
    "it ended before it started": (rows_edited("validations", 1, ended_s=-1.0), "step 0: ended at"),
    # checkpoints
    "a flipped byte": (weights_flipped, "step_000004: hf/model.safetensors: SHA-256 differs"),
    "a truncated file": (weights_cut, "has 4 bytes, the manifest says 7"),
    "a missing file": (file_missing, "hf/model.safetensors is missing"),
    "a file that is not listed": (file_added, "hf/other.bin is not in the manifest"),
    "no manifest": (manifest_missing, "manifest.json cannot be read"),
    "a manifest of another step": (manifest_of_another_step, "its manifest is of step 5"),
    "latest leads nowhere": (latest_dangling, "latest is step_000008, the newest is step 6"),
    "latest is not the newest": (latest_old, "latest is step_000004, the newest is step 6"),
    "no latest": (latest_missing, "latest is no link"),
    "the newest is gone": (newest_removed, "the newest of [4, 6] is not there"),
    "too many kept": (config_edited("checkpoint", keep=1), "2 kept, checkpoint.keep is 1"),
    "not in the summary": (summary_edited(checkpoints=[6]), "step 4 is not in summary.json"),
    "one not written": (config_edited("trainer", save_freq=3), "none of steps [3], at which"),
    "listed twice": (summary_edited(checkpoints=[4, 6, 6]), "summary.json lists [4, 6, 6]"),
    "half of one left over": (half_written_left, "['.writing-step_000006'] left over"),
    "open and closed": (control_edited(4, open=[{"group_id": g} for g in (7, 8, 9)]), "[7] are op"),
    "neither open nor closed": (control_edited(4, open=[{"group_id": 8}]), "groups [9] of 10"),
    "rows lost after the cut": (num_rows_edited(6, samples=30), "knew 30 lines of samples.jsonl"),
    "steps lost after the cut": (num_rows_edited(4, metrics=5), "step 4, but 5 lines of metrics"),
    "trained after the cut": (
        lambda run: (
            num_rows_edited(4, samples=18)(run),
            control_edited(4, next_group_id=10, open=[{"group_id": 9}])(run),
        ),
        "samples ['8-0', '8-1'] were trained after the step of the cut",
    ),
    "no control state": (
        lambda run: (run / "checkpoints/step_000006/control.json").write_text("{}"),
        "control.json: cannot be read",
    ),
    "events that are no JSON": (
        lambda run: (run / "events.jsonl").write_text("oops\n"),
        "events.jsonl:1: is not JSON",
    ),
    "a file missing": (lambda run: (run / "samples.jsonl").unlink(), "samples.jsonl: is missing"),
}


def test_a_sound_folder_is_clean(folder):
    assert audit(folder) == []
    assert examine(folder).notes == []


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_promise_is_found(name, folder):
    damage, expected = BREAKS[name]
    damage(folder)
    found = [str(finding) for finding in audit(folder)]
    assert any(expected in text for text in found), found


def test_what_was_superseded_does_not_count(folder):
    aside = folder / "superseded"
    aside.mkdir()
    shutil.copy(folder / "samples.jsonl", aside / "samples.1.jsonl")
    shutil.copy(folder / "metrics.jsonl", aside / "metrics.1.jsonl")
    assert audit(folder) == []


def test_tokens_of_an_environment_have_no_version(folder):
    rows_edited("samples", 1, num_response_tokens=12)(folder)
    assert len(audit(folder)) == 1
    config_edited("rollout", environment="calculator:Tool")(folder)
    assert audit(folder) == []


def test_a_stopped_run_may_have_open_groups_and_no_last_validation(folder):
    rows_kept("samples", lambda row: row["group_id"] < 8)(folder)
    rows_kept("metrics", lambda row: row["step"] <= 4)(folder)
    rows_kept("validations", lambda row: row["step"] <= 4)(folder)
    shutil.rmtree(folder / "checkpoints/step_000006")
    latest_old(folder)
    counts = Counter(row["status"] for row in read_rows(folder / "samples.jsonl"))
    changes = {"status": "stopped", "exit_code": 130, "steps": 4, "policy_version": 2}
    zeros = {"filtered": 0, "failed": 0, "set_aside": 0}
    samples = {**counts, **zeros, "issued": 20, "open": 4}
    sums = {"validations": 3, "checkpoints": [4], "failures": {}}
    summary_edited(**changes, samples=samples, **sums)(folder)
    assert audit(folder) == []
    summary_edited(samples={**samples, "open": 2})(folder)
    assert any("10 groups issued and 1 open" in str(finding) for finding in audit(folder))


def test_a_failed_run_may_lack_the_validation_of_its_last_step(folder):
    rows_kept("validations", lambda row: row["step"] < 6)(folder)
    summary_edited(status="failed", exit_code=7, policy_version=3, validations=3)(folder)
    assert audit(folder) == []
    rows_kept("validations", lambda row: row["step"] < 4)(folder)
    summary_edited(validations=2)(folder)
    assert [finding.what for finding in audit(folder)] == ["no row of step 4, at which one was due"]


def test_without_held_out_prompts_no_validation_is_due(folder):
    config_edited("data", val_files="")(folder)
    rows_kept("validations", lambda row: False)(folder)
    summary_edited(validations=0)(folder)
    assert audit(folder) == []


def test_a_configuration_that_is_none_is_said(folder):
    (folder / "config.yaml").write_text("[1, 2]\n")
    assert [str(finding) for finding in audit(folder)] == ["config.yaml: holds no object"]


def test_data_that_it_cannot_count_is_said_and_can_be_given(folder):
    config_edited("data", train_files="reasoning_gym:chain_sum")(folder)
    prompt_swapped(folder)
    assert len(examine(folder).notes) == 1
    assert not any("no group of prompts" in str(finding) for finding in audit(folder))
    found = audit(folder, data=[folder.parent / "data.jsonl"])
    assert any("no group of prompts" in str(finding) for finding in found)


def test_the_command_says_what_is_wrong_by_its_exit_code(folder, capsys):
    assert main([str(folder)]) == 0
    assert "28 samples, 6 steps, 0 broken promises" in capsys.readouterr().out
    row_repeated("samples", 3)(folder)
    assert main([str(folder)]) == 1
    assert "samples.jsonl:29: sample 1-0 again" in capsys.readouterr().out


def test_it_runs_alone_and_imports_nothing_of_ours(folder):
    script = Path(audit_module.__file__)
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{str(script)!r}, {str(folder)!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(script)!r}, run_name='__main__')\n"
        "finally:\n"
        "    assert not any(name.split('.')[0] == 'freewheel' for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
