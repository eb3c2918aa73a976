"""Audit of a run folder by its written contract alone; imports nothing of Freewheel.

    python tests/audit.py RUN_DIR [--data FILE ...] [--val-data FILE ...]

Prints each promise of docs/run-folder.md, docs/staleness.md and docs/validation.md that the folder
breaks, with file and line; exit code 1 if there is any. It judges an ended run by the settings in
its config.yaml, which are those of its last part: if the staleness bound, `test_freq` or
`save_freq` were changed at a resume, what is older than that may be reported. `superseded/` is
never read. The number of prompts is counted in JSONL files; for data of other kinds give `--data`
a JSONL file with as many lines, or what depends on that number is left out (and said).
One file, though a long one: it can be copied beside any run folder and run there.
"""

import argparse
import hashlib
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]

FATES = ("trained", "filtered", "failed", "set_aside")
PROMPT_FAILURES = {"over_long_prompt", "bad_prompt"}
ROLLOUT_FAILURES = {
    *("timeout", "environment", "reward", "engine", "lost_worker", "lost_replica"),
    *("wrong_version", "group", *PROMPT_FAILURES),
}
NUMBER = (int, float)
OPTIONAL_NUMBER = (int, float, type(None))
SAMPLE_FIELDS: dict[str, Any] = {
    "sample_id": str,
    "group_id": int,
    "epoch": int,
    "prompt_index": int,
    "attempt": int,
    "status": str,
    "failure": (str, type(None)),
    "message": str,
    "reward": OPTIONAL_NUMBER,
    "num_prompt_tokens": int,
    "num_response_tokens": int,
    "version_spans": list,
    "started_s": NUMBER,
    "ended_s": NUMBER,
    "trained_step": (int, type(None)),
}
VALIDATION_FIELDS: dict[str, Any] = {
    "step": int,
    "policy_version": int,
    "mode": str,
    "status": str,
    "reason": str,
    "n_total": int,
    "n_done": int,
    "n_failed": dict,
    "n_timeout": int,
    "score": OPTIONAL_NUMBER,
    "score_lower": OPTIONAL_NUMBER,
    "score_upper": OPTIONAL_NUMBER,
    "ci95": (list, type(None)),
    "metrics": dict,
    "started_s": NUMBER,
    "ended_s": NUMBER,
    "response_versions": dict,
}
METRICS_FIELDS: dict[str, Any] = {"step": int, "policy_version": int, "time_s": NUMBER}
SUMMARY_FIELDS: dict[str, Any] = {
    "status": str,
    "exit_code": int,
    "cause": str,
    "steps": int,
    "policy_version": int,
    "samples": dict,
    "failures": dict,
    "late_results": int,
    "wall_s": NUMBER,
    "trainer_wait_s": dict,
    "rollout_idle_ratio": NUMBER,
    "validations": int,
    "checkpoints": list,
    "restarts": int,
}
EPSILON_S = 2e-6
"""Times are written in microseconds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise: where, and what is wrong. `line` counts from 1; 0: the whole file."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"


@dataclass(slots=True)
class Line:
    """A row and the number of its line."""

    number: int
    row: Row


@dataclass(slots=True)
class Folder:
    """The files of a run, as far as they can be read, and what was found wrong so far."""

    path: Path
    config: Row = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    samples: list[Line] = field(default_factory=list)
    metrics: list[Line] = field(default_factory=list)
    validations: list[Line] = field(default_factory=list)
    num_prompts: int | None = None
    num_val_prompts: int | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, file: str, line: int, what: str) -> None:
        self.findings.append(Finding(file, line, what))

    def setting(self, key: str) -> Any:
        section, name = key.split(".")
        return self.config[section][name]

    @property
    def completed(self) -> bool:
        return self.summary["status"] == "completed"

    @property
    def steps(self) -> int:
        return self.summary["steps"]

    @property
    def trigger(self) -> int:
        return self.setting("async_training.trigger_parameter_sync_step")

    @property
    def groups_per_step(self) -> int:
        batches = self.setting("async_training.require_batches")
        return batches * self.setting("actor.ppo_mini_batch_size")

    @property
    def staleness_bound(self) -> int:
        most = self.setting("async_training.max_staleness")
        return (
            math.ceil(self.setting("async_training.staleness_threshold")) if most is None else most
        )

    @property
    def max_open(self) -> int:
        per_version = self.groups_per_step * self.trigger
        threshold = self.setting("async_training.staleness_threshold")
        return per_version + math.floor(threshold * per_version + 1e-9)

    @property
    def min_group_size(self) -> int:
        n = self.setting("rollout.n")
        return self.setting("rollout.min_group_size") or min(n, max(2, (n + 1) // 2))


def audit(path: Path, data: Sequence[Path] = (), val_data: Sequence[Path] = ()) -> list[Finding]:
    """All broken promises of a run folder; empty if there is none."""
    return examine(path, data, val_data).findings


def examine(path: Path, data: Sequence[Path] = (), val_data: Sequence[Path] = ()) -> Folder:
    """The folder with what was found, and notes on what could not be checked."""
    folder = _read(path, data, val_data)
    if folder.config and folder.summary:
        check_samples(folder)
        check_groups(folder)
        check_epochs(folder)
        check_metrics(folder)
        check_trained(folder)
        check_open_groups(folder)
        check_summary(folder)
        check_validations(folder)
        check_checkpoints(folder)
    return folder


# -- reading ----------------------------------------------------------------------------------


def _read(path: Path, data: Sequence[Path], val_data: Sequence[Path]) -> Folder:
    folder = Folder(path)
    folder.config = _read_object(folder, "config.yaml", yaml.safe_load)
    folder.summary = _read_object(folder, "summary.json", json.loads)
    line = Line(0, folder.summary)
    if line.row and not _fields_ok(folder, "summary.json", line, SUMMARY_FIELDS):
        folder.summary = {}
    folder.samples = list(_read_rows(folder, "samples.jsonl", SAMPLE_FIELDS))
    folder.metrics = list(_read_rows(folder, "metrics.jsonl", METRICS_FIELDS, more=True))
    folder.validations = list(_read_rows(folder, "validations.jsonl", VALIDATION_FIELDS))
    for _ in _read_rows(folder, "events.jsonl", {"event": str, "t_s": NUMBER}, more=True):
        pass
    if folder.config:
        folder.num_prompts = _count_prompts(folder, "train", data)
        folder.num_val_prompts = _count_prompts(folder, "val", val_data)
    return folder


def _read_object(folder: Folder, name: str, parse: Any) -> Row:
    try:
        found = parse((folder.path / name).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        folder.report(name, 0, f"cannot be read: {error}; has the run ended?")
        return {}
    if not isinstance(found, dict):
        folder.report(name, 0, "holds no object")
        return {}
    return found


def _read_rows(
    folder: Folder, name: str, fields: dict[str, Any], *, more: bool = False
) -> Iterator[Line]:
    """The rows whose fields are those of the contract; `more`: others may be there, too."""
    path = folder.path / name
    if not path.exists():
        folder.report(name, 0, "is missing")
        return
    text = path.read_text()
    if text and not text.endswith("\n"):
        folder.report(name, text.count("\n") + 1, "the last line is not whole")
    for number, text_line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(text_line)
        except ValueError:
            folder.report(name, number, "is not JSON")
            continue
        line = Line(number, row)
        if _fields_ok(folder, name, line, fields, more=more):
            yield line


def _fields_ok(
    folder: Folder, name: str, line: Line, fields: dict[str, Any], *, more: bool = False
) -> bool:
    row = line.row
    if not isinstance(row, dict):
        folder.report(name, line.number, "is no object")
        return False
    wrong = [f"no field {key}" for key in fields if key not in row]
    wrong += [
        f"{key} is {row[key]!r}"
        for key, kind in fields.items()
        if key in row and (not isinstance(row[key], kind) or isinstance(row[key], bool))
    ]
    if not more and name.endswith(".jsonl"):
        wrong += [f"field {key} is not in the contract" for key in row if key not in fields]
    for what in wrong:
        folder.report(name, line.number, what)
    return not wrong


def _count_prompts(folder: Folder, split: str, given: Sequence[Path]) -> int | None:
    files = folder.setting(f"data.{split}_files")
    names = [files] if isinstance(files, str) else list(files)
    paths = list(given) or [Path(name).expanduser() for name in names if name]
    if not all(path.suffix == ".jsonl" and path.is_file() for path in paths):
        folder.notes.append(f"data.{split}_files are not JSONL files here: prompts not counted")
        return None
    total = sum(len(line.strip()) > 1 for path in paths for line in path.read_bytes().splitlines())
    most = folder.setting(f"data.{split}_max_samples")
    return min(total, most) if most else total


# -- samples ----------------------------------------------------------------------------------


def check_samples(folder: Folder) -> None:
    """Each sample by itself: its id, its fate and what goes with it."""
    first: dict[str, int] = {}
    for line in folder.samples:
        row = line.row
        before = first.setdefault(row["sample_id"], line.number)
        if before != line.number:
            text = f"sample {row['sample_id']} again, first in line {before}"
            folder.report("samples.jsonl", line.number, text)
        for what in _wrong_with_sample(folder, row):
            text = f"sample {row['sample_id']}: {what}"
            folder.report("samples.jsonl", line.number, text)


def _wrong_with_sample(folder: Folder, row: Row) -> Iterator[str]:
    ids = {f"{row['group_id']}-{i}" for i in range(folder.setting("rollout.n"))}
    if row["sample_id"] not in ids:
        yield f"is no id of group {row['group_id']}"
    if row["status"] not in FATES:
        yield f"unknown status {row['status']!r}"
    if row["failure"] is not None and row["failure"] not in ROLLOUT_FAILURES:
        yield f"unknown class of failure {row['failure']!r}"
    if row["ended_s"] < row["started_s"]:
        yield f"ended at {row['ended_s']} s, before it started at {row['started_s']} s"
    yield from _wrong_with_spans(folder, row)
    yield from _wrong_with_fate(row)


def _wrong_with_spans(folder: Folder, row: Row) -> Iterator[str]:
    spans, tokens = row["version_spans"], row["num_response_tokens"]
    if not _are_pairs(spans):
        yield f"version_spans {spans} are no pairs of version and tokens"
        return
    versions, total = [version for version, _ in spans], sum(num for _, num in spans)
    if versions != sorted(set(versions)):
        yield f"versions {versions} do not rise"
    if len(versions) > 1 and not folder.setting("async_training.partial_rollout"):
        yield f"versions {versions}, but partial_rollout is off"
    # What an environment adds to a response was sampled under no version.
    exact = folder.setting("rollout.environment") == "single_turn"
    if total > tokens or (exact and total != tokens):
        yield f"version_spans hold {total} tokens, the response {tokens}"


def _are_pairs(spans: list[Any]) -> bool:
    return all(isinstance(s, list) and len(s) == 2 and s[0] >= 0 and s[1] > 0 for s in spans)


def _wrong_with_fate(row: Row) -> Iterator[str]:
    status, failure = row["status"], row["failure"]
    dropped = status == "set_aside" or failure in PROMPT_FAILURES
    if row["attempt"] < (0 if dropped else 1):
        yield f"{status} in attempt {row['attempt']}"
    if status == "trained":
        if failure is not None:
            yield f"trained with failure {failure}"
        if row["reward"] is None or not row["version_spans"]:
            yield "trained without reward or tokens"
        if row["trained_step"] is None:
            yield "trained in no step"
        return
    if row["trained_step"] is not None:
        yield f"{status}, but trained in step {row['trained_step']}"
    if status == "failed" and failure is None:
        yield "failed without a class"
    if status in ("filtered", "set_aside") and failure not in {None, *PROMPT_FAILURES}:
        yield f"{status} with failure {failure}"


def _by_group(folder: Folder) -> dict[int, list[Line]]:
    groups: dict[int, list[Line]] = defaultdict(list)
    for line in folder.samples:
        groups[line.row["group_id"]].append(line)
    return groups


def check_groups(folder: Folder) -> None:
    """Each group is whole and of one mind; no prompt has two groups in an epoch."""
    place_of: dict[tuple[int, int], int] = {}
    for group_id, lines in _by_group(folder).items():
        row, number = lines[0].row, lines[-1].number
        place = (row["epoch"], row["prompt_index"])
        other = place_of.setdefault(place, group_id)
        if other != group_id:
            text = f"group {group_id} is of prompt {place[1]} in epoch {place[0]}, as is {other}"
            folder.report("samples.jsonl", number, text)
        for what in _wrong_with_group(folder, [line.row for line in lines]):
            folder.report("samples.jsonl", number, f"group {group_id}: {what}")


def _wrong_with_group(folder: Folder, rows: list[Row]) -> Iterator[str]:
    n = folder.setting("rollout.n")
    if len(rows) != n:
        yield f"{len(rows)} samples, {n} wanted"
    for key in ("epoch", "prompt_index"):
        if len({row[key] for row in rows}) > 1:
            yield f"{key} differs: {sorted({row[key] for row in rows})}"
    steps = {row["trained_step"] for row in rows if row["status"] == "trained"}
    if len(steps) > 1:
        yield f"trained in steps {sorted(map(str, steps))}"
    fates = {row["status"] for row in rows}
    if fates - {"failed"} not in (set(), {"trained"}, {"filtered"}, {"set_aside"}):
        yield f"fates {sorted(fates)} in one group"
    num_trained = sum(row["status"] == "trained" for row in rows)
    if 0 < num_trained < folder.min_group_size:
        yield f"trained with {num_trained} members, at least {folder.min_group_size} wanted"


def check_epochs(folder: Folder) -> None:
    """Groups are numbered by their place in the epochs; none is missing but those that are open."""
    groups = {group_id: lines[0] for group_id, lines in _by_group(folder).items()}
    n, counts = folder.setting("rollout.n"), folder.summary["samples"]
    num_issued, num_open = counts.get("issued", 0) // n, counts.get("open", 0) // n
    missing = sorted(set(range(num_issued)) - set(groups))
    if len(missing) != num_open:
        text = f"{num_issued} groups issued and {num_open} open, but no line of groups {missing}"
        folder.report("samples.jsonl", 0, text)
    for group_id in sorted(set(groups) - set(range(num_issued))):
        text = f"group {group_id}, but only {num_issued} were issued"
        folder.report("samples.jsonl", groups[group_id].number, text)
    if folder.num_prompts:
        _check_places(folder, groups, folder.num_prompts)
        _check_complete_epochs(folder, groups, num_issued // folder.num_prompts, missing)


def _check_places(folder: Folder, groups: dict[int, Line], num_prompts: int) -> None:
    for group_id, line in groups.items():
        if line.row["epoch"] != group_id // num_prompts:
            text = f"group {group_id} of epochs of {num_prompts} prompts in {line.row['epoch']}"
            folder.report("samples.jsonl", line.number, text)
        if not 0 <= line.row["prompt_index"] < num_prompts:
            text = f"group {group_id}: prompt {line.row['prompt_index']} of {num_prompts}"
            folder.report("samples.jsonl", line.number, text)


def _check_complete_epochs(
    folder: Folder, groups: dict[int, Line], num_epochs: int, missing: list[int]
) -> None:
    """Every prompt of every epoch whose prompts were all issued has its group."""
    num_prompts = folder.num_prompts or 0
    seen: dict[int, set[int]] = defaultdict(set)
    for line in groups.values():
        seen[line.row["epoch"]].add(line.row["prompt_index"])
    num_open = len(missing) if folder.summary["samples"].get("open") else 0
    for epoch in range(num_epochs):
        absent = sorted(set(range(num_prompts)) - seen[epoch])
        if len(absent) > num_open:
            folder.report("samples.jsonl", 0, f"epoch {epoch}: no group of prompts {absent}")
    wanted = folder.setting("trainer.total_epochs")
    by_epochs = folder.setting("trainer.total_training_steps") is None
    if folder.completed and by_epochs and num_epochs != wanted:
        folder.report("samples.jsonl", 0, f"{num_epochs} complete epochs, {wanted} wanted")


# -- steps ------------------------------------------------------------------------------------


def check_metrics(folder: Folder) -> None:
    """Each step once, in order; a version every so many steps; time goes forward."""
    time_s = 0.0
    for expected, line in enumerate(folder.metrics, start=1):
        row = line.row
        if row["step"] != expected:
            text = f"step {row['step']}, step {expected} wanted"
            folder.report("metrics.jsonl", line.number, text)
        version = (row["step"] - 1) // folder.trigger
        if row["policy_version"] != version:
            text = f"step {row['step']} under version {row['policy_version']}, {version} wanted"
            folder.report("metrics.jsonl", line.number, text)
        if row["time_s"] < time_s:
            text = f"at {row['time_s']} s, the step before at {time_s} s"
            folder.report("metrics.jsonl", line.number, text)
        time_s = row["time_s"]


def check_trained(folder: Folder) -> None:
    """What was trained: in a step that is recorded, so many groups a step, within the bound."""
    steps = {line.row["step"]: line for line in folder.metrics}
    trained: dict[int, list[Line]] = defaultdict(list)
    for line in folder.samples:
        if line.row["status"] == "trained" and line.row["trained_step"] is not None:
            trained[line.row["trained_step"]].append(line)
    for step, lines in trained.items():
        if step not in steps:
            text = f"trained in step {step}, which metrics.jsonl does not have"
            folder.report("samples.jsonl", lines[0].number, text)
            continue
        for line in lines:
            for what in _wrong_with_staleness(folder, line.row, steps[step].row):
                text = f"sample {line.row['sample_id']}: {what}"
                folder.report("samples.jsonl", line.number, text)
    for step, line in steps.items():
        for what in _wrong_with_step(folder, line.row, [one.row for one in trained[step]]):
            folder.report("metrics.jsonl", line.number, f"step {step}: {what}")


def _wrong_with_staleness(folder: Folder, row: Row, step: Row) -> Iterator[str]:
    if not row["version_spans"] or not _are_pairs(row["version_spans"]):
        return
    versions = [version for version, _ in row["version_spans"]]
    staleness = step["policy_version"] - min(versions)
    if staleness > folder.staleness_bound:
        yield (
            f"{staleness} versions old in step {step['step']} (version {step['policy_version']}), "
            f"at most {folder.staleness_bound} allowed"
        )
    if max(versions) > step["policy_version"]:
        yield f"of version {max(versions)} in a step under version {step['policy_version']}"


def _wrong_with_step(folder: Folder, step: Row, rows: list[Row]) -> Iterator[str]:
    size, num_groups = folder.groups_per_step, len({row["group_id"] for row in rows})
    # At the end of the data there may be fewer left.
    by_epochs = folder.setting("trainer.total_training_steps") is None
    is_short = by_epochs and step["step"] == folder.steps and 0 < num_groups < size
    if num_groups != size and not is_short:
        yield f"{num_groups} groups trained, {size} wanted"
        return
    if "critic/rewards/mean" in step:
        mean = sum(row["reward"] or 0.0 for row in rows) / len(rows)
        if not math.isclose(mean, step["critic/rewards/mean"], abs_tol=1e-5):
            yield f"critic/rewards/mean {step['critic/rewards/mean']}, its samples have {mean}"


def check_open_groups(folder: Folder) -> None:
    """At no time were more groups started and not yet trained than the bound allows."""
    trained_s = {line.row["step"]: line.row["time_s"] for line in folder.metrics}
    moments: list[tuple[float, int, int]] = []
    for lines in _by_group(folder).values():
        rows, number = [line.row for line in lines], lines[0].number
        if rows[0]["attempt"] == 0:
            continue  # dropped: it never started
        # Open at least from the first of the attempts that counted to the last one's end.
        began_s = min(row["started_s"] for row in rows) + EPSILON_S
        ended_s = max(trained_s.get(row["trained_step"], row["ended_s"]) for row in rows)
        moments += [(began_s, 1, number), (max(began_s, ended_s), -1, number)]
    num_open = 0
    for at_s, change, number in sorted(moments):
        num_open += change
        if num_open > folder.max_open:
            text = f"{num_open} groups open at {at_s:.6f} s, at most {folder.max_open} allowed"
            folder.report("samples.jsonl", number, text)
            return


# -- summary ----------------------------------------------------------------------------------


def check_summary(folder: Folder) -> None:
    """The summary says what the files hold."""
    summary = folder.summary
    for what in (
        *_wrong_with_counts(summary["samples"], folder.samples),
        *_wrong_with_failures(summary["failures"], folder.samples),
        *_wrong_with_end(folder),
    ):
        folder.report("summary.json", 0, what)


def _wrong_with_counts(counts: Row, samples: list[Line]) -> Iterator[str]:
    fates = Counter(line.row["status"] for line in samples)
    for fate in FATES:
        if counts.get(fate) != fates[fate]:
            yield f"samples.{fate} is {counts.get(fate)}, samples.jsonl has {fates[fate]}"
    ended = len(samples) + counts.get("open", 0)
    if counts.get("issued") != ended:
        yield f"samples.issued is {counts.get('issued')}, ended or open are {ended}"


def _wrong_with_failures(failures: Row, samples: list[Line]) -> Iterator[str]:
    found = Counter(line.row["failure"] for line in samples if line.row["failure"] is not None)
    if failures != found:
        yield f"failures are {failures}, samples.jsonl has {dict(found)}"


def _wrong_with_end(folder: Folder) -> Iterator[str]:
    summary, steps = folder.summary, folder.steps
    if steps != len(folder.metrics):
        yield f"steps is {steps}, metrics.jsonl has {len(folder.metrics)} lines"
    published = {steps // folder.trigger, -(-steps // folder.trigger)}
    if folder.completed:
        published = {max(published)}
    if summary["policy_version"] not in published:
        yield f"policy_version is {summary['policy_version']} after {steps} steps"
    if summary["validations"] != len(folder.validations):
        yield f"validations is {summary['validations']}, the file has {len(folder.validations)}"
    if folder.completed != (summary["exit_code"] == 0):
        yield f"status {summary['status']} with exit code {summary['exit_code']}"
    if not folder.completed:
        return
    if summary["samples"].get("open"):
        yield f"completed, but {summary['samples']['open']} samples are open"
    total = folder.setting("trainer.total_training_steps")
    if total is not None and steps != total:
        yield f"completed after {steps} steps, {total} wanted"


# -- validations ------------------------------------------------------------------------------


def check_validations(folder: Folder) -> None:
    """Each due step has one row; each row is of one version and adds up."""
    rows_of = Counter(line.row["step"] for line in folder.validations)
    due, may_be = _due_steps(folder)
    for step in sorted(due - set(rows_of)):
        folder.report("validations.jsonl", 0, f"no row of step {step}, at which one was due")
    for line in folder.validations:
        step = line.row["step"]
        if rows_of[step] > 1:
            folder.report("validations.jsonl", line.number, f"{rows_of[step]} rows of step {step}")
        if step not in due | may_be:
            folder.report("validations.jsonl", line.number, f"none was due at step {step}")
        for what in _wrong_with_validation(folder, line.row):
            folder.report("validations.jsonl", line.number, f"step {step}: {what}")


def _due_steps(folder: Folder) -> tuple[set[int], set[int]]:
    """Steps that must have a row, and those that may have one (a run that was cut off)."""
    if not folder.setting("data.val_files"):
        return set(), set()
    steps, freq = folder.steps, folder.setting("trainer.test_freq")
    due = set(range(freq, steps + 1, freq)) if freq else set()
    may_be: set[int] = set()
    if folder.setting("trainer.val_before_train"):
        (due if steps else may_be).add(0)
    if folder.setting("trainer.val_at_end"):
        (due if folder.completed else may_be).add(steps)
    if folder.summary["status"] == "failed" and steps in due:
        due.remove(steps)
        may_be.add(steps)
    return due, may_be


def _wrong_with_validation(folder: Folder, row: Row) -> Iterator[str]:
    at_end = row["step"] == folder.steps
    versions = {row["step"] // folder.trigger}
    if at_end:
        versions.add(-(-row["step"] // folder.trigger))
    if row["policy_version"] not in versions:
        yield f"of version {row['policy_version']}, {sorted(versions)} wanted"
    if row["status"] not in ("complete", "partial", "skipped"):
        yield f"unknown status {row['status']!r}"
    if (row["status"] == "complete") == bool(row["reason"]):
        yield f"{row['status']} with reason {row['reason']!r}"
    missing = row["n_timeout"] + sum(row["n_failed"].values())
    if row["n_total"] != row["n_done"] + missing:
        yield f"n_total {row['n_total']} is not {row['n_done']} done and {missing} missing"
    if (row["status"] == "complete") != (row["n_done"] == row["n_total"] > 0):
        yield f"{row['status']} with {row['n_done']} of {row['n_total']} done"
    yield from _wrong_with_responses(folder, row)
    yield from _wrong_with_score(row)


def _wrong_with_responses(folder: Folder, row: Row) -> Iterator[str]:
    expected = {str(row["policy_version"]): row["n_done"]} if row["n_done"] else {}
    if row["response_versions"] != expected:
        yield f"response_versions {row['response_versions']}, {expected} wanted"
    if row["ended_s"] < row["started_s"]:
        yield f"ended at {row['ended_s']} s, before it started at {row['started_s']} s"
    if row["status"] != "skipped" and folder.num_val_prompts is not None:
        total = folder.num_val_prompts * folder.setting("validation.n")
        if row["n_total"] != total:
            yield f"n_total {row['n_total']}, {total} wanted"


def _wrong_with_score(row: Row) -> Iterator[str]:
    score, lower, upper = row["score"], row["score_lower"], row["score_upper"]
    if (score is None) == bool(row["n_done"]):
        yield f"score {score} with {row['n_done']} done"
    if score is None:
        return
    if lower is None or upper is None or not lower - 1e-9 <= score <= upper + 1e-9:
        yield f"score {score} is not between {lower} and {upper}"


# -- checkpoints ------------------------------------------------------------------------------


def check_checkpoints(folder: Folder) -> None:
    """Each checkpoint is whole and agrees with the files; `latest` is the newest."""
    root = folder.path / "checkpoints"
    found = {
        int(path.name[5:]): path
        for path in (root.iterdir() if root.is_dir() else ())
        if re.fullmatch(r"step_\d{6,}", path.name)
    }
    for path in found.values():
        name = f"checkpoints/{path.name}"
        for what in _wrong_with_files(path):
            folder.report(name, 0, what)
        for what in _wrong_with_control(folder, path):
            folder.report(f"{name}/control.json", 0, what)
    for what in _wrong_with_set(folder, root, found):
        folder.report("checkpoints", 0, what)


def _wrong_with_files(path: Path) -> Iterator[str]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        listed, step = manifest["files"], manifest["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"manifest.json cannot be read: {error!r}"
        return
    if path.name != f"step_{step:06d}":
        yield f"its manifest is of step {step}"
    there = {
        file.relative_to(path).as_posix()
        for file in path.rglob("*")
        if file.is_file() and file != path / "manifest.json"
    }
    for name in sorted(there ^ set(listed)):
        yield f"{name} is {'not in the manifest' if name in there else 'missing'}"
    for name in sorted(there & set(listed)):
        content = (path / name).read_bytes()
        if len(content) != listed[name]["num_bytes"]:
            yield f"{name} has {len(content)} bytes, the manifest says {listed[name]['num_bytes']}"
        elif hashlib.sha256(content).hexdigest() != listed[name]["sha256"]:
            yield f"{name}: SHA-256 differs"


def _wrong_with_control(folder: Folder, path: Path) -> Iterator[str]:
    """The ledger of the cut and the lines of that moment hold each issued group exactly once."""
    try:
        control = json.loads((path / "control.json").read_text())
        step, ledger, num_rows = control["train"]["step"], control["ledger"], control["num_rows"]
        open_ids = [group["group_id"] for group in ledger["open"]]
        num_groups = ledger["next_group_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"cannot be read: {error!r}"
        return
    if num_rows["metrics"] != step:
        yield f"step {step}, but {num_rows['metrics']} lines of metrics.jsonl"
    closed = [line.row for line in folder.samples if line.number <= num_rows["samples"]]
    if len(closed) != num_rows["samples"]:
        yield f"knew {num_rows['samples']} lines of samples.jsonl, which has {len(closed)}"
    closed_ids = {row["group_id"] for row in closed}
    if both := sorted(closed_ids & set(open_ids)):
        yield f"groups {both} are open, but samples.jsonl had them already"
    if lost := sorted(set(range(num_groups)) - closed_ids - set(open_ids)):
        yield f"groups {lost} of {num_groups} are neither open nor in samples.jsonl"
    later = [row["sample_id"] for row in closed if (row["trained_step"] or 0) > step]
    if later:
        yield f"samples {later} were trained after the step of the cut"


def _wrong_with_set(folder: Folder, root: Path, found: dict[int, Path]) -> Iterator[str]:
    saved, steps = folder.summary["checkpoints"], folder.steps
    for step in sorted(set(found) - set(saved)):
        yield f"step {step} is not in summary.json"
    if len(found) > folder.setting("checkpoint.keep"):
        yield f"{len(found)} kept, checkpoint.keep is {folder.setting('checkpoint.keep')}"
    latest = root / "latest"
    if found and not latest.is_symlink():
        yield "latest is no link"
    elif found and latest.resolve() != found[max(found)].resolve():
        yield f"latest is {latest.readlink()}, the newest is step {max(found)}"
    if saved and max(saved) not in found:
        yield f"the newest of {saved} is not there"
    if saved != sorted(set(saved)):
        yield f"summary.json lists {saved}"
    freq = folder.setting("trainer.save_freq")
    due = set(range(freq, steps + 1, freq)) if freq else set()
    if folder.completed:
        if missing := sorted((due | {steps}) - set(saved)):
            yield f"none of steps {missing}, at which one was due"
        if left := sorted(path.name for path in root.glob(".writing-*")):
            yield f"{left} left over"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong with a run folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="training prompts, JSONL")
    parser.add_argument("--val-data", type=Path, nargs="+", default=[], help="held-out prompts")
    options = parser.parse_args(arguments)
    folder = examine(options.run_dir, options.data, options.val_data)
    _write(f"note: {note}" for note in folder.notes)
    _write(map(str, folder.findings))
    counts = f"{len(folder.samples)} samples, {len(folder.metrics)} steps"
    _write([f"{options.run_dir}: {counts}, {len(folder.findings)} broken promises"])
    return 1 if folder.findings else 0


def _write(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
