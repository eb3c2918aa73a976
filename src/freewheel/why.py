"""Why a run does what it does: answers for a live, stuck, killed or finished run."""

import time
from dataclasses import dataclass
from pathlib import Path

from freewheel.liveness import SILENT_S, liveness
from freewheel.progress_text import duration
from freewheel.run_folder import LastStatus, RunFolder
from freewheel.status import RunStatus, Wait

ADVICE = {
    1: "An unexpected error: please report it, with the traceback that was printed.",
    2: "Correct what the message names, and start again.",
    3: "See what the worker's log says (logs/), and whether the machine has what the run asks for "
    "(freewheel train RECIPE --dry-run).",
    4: "Read the report under hang/: the stage that stopped, who waits for whom, the stacks of all "
    "processes. If the stage is only slow, raise the limit that the message names.",
    5: "See the lost worker's log (logs/); out of memory is the commonest cause. Then resume.",
    6: "Look at the last rows of metrics.jsonl (actor/grad_norm, rollout_corr/kl); a lower "
    "learning rate is the commonest remedy. Resume from the last checkpoint.",
    7: "If something cannot be written, or not in time: free or mend the disk that the message "
    "names, then resume; earlier checkpoints are whole. If a checkpoint is broken: freewheel "
    "checkpoints RUN_DIR --verify tells which are whole, freewheel resume RUN_DIR --from STEP "
    "takes another. If it does not fit: resume with the model, the data and the settings that it "
    "was made with.",
    8: "A bug of Freewheel: please report it, with the run's events.jsonl.",
    9: "Correct the data that the message names.",
    10: "A bug of Freewheel: please report it, with the run's events.jsonl.",
    11: "Free or mend the disk of the run folder, or the logger that the message names, then "
    "resume. If records have fewer lines than "
    "the checkpoint knew: put them back from superseded/, or resume from an earlier checkpoint.",
    12: "See why the trials failed (n_failed in validations.jsonl, the workers' logs under logs/), "
    "mend that, and validate again.",
    13: "See engine_mismatch/* in metrics.jsonl: a large difference means wrong weights or another "
    "model in the engine; one that rounding explains (bfloat16: a few hundredths) wants a higher "
    "health.max_logprob_difference.",
}

VALIDATION_ADVICE = {
    **ADVICE,
    5: "See the lost worker's log (logs/); out of memory is the commonest cause.",
    6: "",
    7: "See whether the checkpoint is whole (freewheel checkpoints RUN_DIR --verify).",
    11: "Free or mend the disk of the folder.",
}
"""A validation by hand has nothing to resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Answers, a sentence or two each; `details` are lines for who wants to know more."""

    doing: str
    waiting_for: str
    because: str
    advice: str
    details: tuple[str, ...] = ()


def explain(folder: RunFolder, *, now_s: float | None = None) -> Explanation:
    """Explain a run.

    Args:
        folder: of the run, open to read.
        now_s: the wall clock, in seconds since the epoch; None: now.
    """
    summary, last = folder.read_summary(), folder.read_status()
    now_s = time.time() if now_s is None else now_s
    if summary is not None:
        return _explain_end(folder, summary)
    if last is None:
        return Explanation(
            doing="It has only begun, or ended before its first sign of life.",
            waiting_for="Unknown.",
            because="It has left no status, or none that can be read.",
            advice=f"See {folder.path / 'events.jsonl'} and {folder.path / 'logs'}.",
        )
    match liveness(folder, last, now_s=now_s):
        case "live":
            return _explain_live(folder, last, now_s)
        case "dead":
            return _explain_killed(folder, last, now_s)
        case "unknown":
            return _explain_unknown(folder, last, now_s)


def _explain_end(folder: RunFolder, summary: dict[str, object]) -> Explanation:
    origin = folder.read_origin()
    code, reports = int(str(summary["exit_code"])), _reports(folder)
    if origin.purpose == "validate":
        return _explain_validation_end(folder, origin.target, summary, reports)
    if summary["status"] == "completed":
        done = f"It completed {summary['steps']} steps."
        return Explanation(
            doing=done, waiting_for="Nothing.", because="", advice="", details=reports
        )
    if summary["status"] == "stopped":
        return Explanation(
            doing=f"It was stopped at step {summary['steps']}.",
            waiting_for="Nothing.",
            because=f"By {summary['cause']}.",
            advice=_how_to_go_on(folder),
            details=reports,
        )
    return Explanation(
        doing=f"It failed at step {summary['steps']}, with exit code {code}.",
        waiting_for="Nothing: it has ended.",
        because=str(summary["cause"]),
        advice=ADVICE.get(code, ""),
        details=reports,
    )


def _explain_validation_end(
    folder: RunFolder, target: str, summary: dict[str, object], reports: tuple[str, ...]
) -> Explanation:
    code = int(str(summary["exit_code"]))
    if summary["status"] == "completed":
        doing, advice = f"It is a validation by hand and has scored {target}.", ""
    else:
        how = "was stopped" if summary["status"] == "stopped" else f"failed with exit code {code}"
        doing = f"It is a validation by hand of {target}; it {how}."
        advice = f"{VALIDATION_ADVICE.get(code, '')} {_how_to_go_on(folder)}".strip()
    return Explanation(
        doing=doing,
        waiting_for="Nothing: it has ended.",
        because=str(summary["cause"] or ""),
        advice=advice,
        details=reports,
    )


def _how_to_go_on(folder: RunFolder) -> str:
    origin = folder.read_origin()
    if origin.purpose == "validate":
        return f"To score again: {origin.validate_command(folder.path)}"
    return f"To go on: freewheel resume {folder.path}"


def _explain_killed(folder: RunFolder, last: LastStatus, now_s: float) -> Explanation:
    return Explanation(
        doing="It is dead: no process holds the folder, and it wrote no summary.",
        waiting_for="Nothing.",
        because=(
            "It was killed (SIGKILL, out of memory, a lost machine) "
            f"{duration(now_s - last.updated)} ago, {_at(last)}."
        ),
        advice=_how_to_go_on(folder) + _newest_checkpoint(folder, last),
        details=(*_waits(last.status), *_reports(folder)),
    )


def _explain_unknown(folder: RunFolder, last: LastStatus, now_s: float) -> Explanation:
    process = f"process {last.pid} on {last.host}"
    return Explanation(
        doing=f"It cannot be told from here whether it still runs, as {process}.",
        waiting_for="Unknown.",
        because=(
            "The lock of its folder cannot be looked at (no permission, or no locks on its file "
            f"system), and its last sign of life came {duration(now_s - last.updated)} ago, "
            f"{_at(last)}."
        ),
        advice=(
            f"On {last.host}, if the process is there: freewheel doctor --pid {last.pid}. If it "
            f"is not: {_how_to_go_on(folder)}{_newest_checkpoint(folder, last)}"
        ),
        details=(*_waits(last.status), *_reports(folder)),
    )


def _at(last: LastStatus) -> str:
    return f"at step {last.status.step}, while it was {last.status.phase}"


def _newest_checkpoint(folder: RunFolder, last: LastStatus) -> str:
    if folder.read_origin().purpose == "validate":
        return ""
    saved = last.status.last_checkpoint
    return f" ({'no checkpoint yet' if saved is None else f'newest checkpoint: step {saved}'})"


def _explain_live(folder: RunFolder, last: LastStatus, now_s: float) -> Explanation:
    status, silent_s = last.status, now_s - last.updated
    doing = f"It is {status.phase}: step {status.step}, policy version {status.policy_version}."
    details = (*_waits(status), *_reports(folder))
    if silent_s > SILENT_S:
        return Explanation(
            doing=doing,
            waiting_for="Unknown: its control plane gives no sign of life.",
            because=f"It has not renewed its status for {duration(silent_s)}: its event loop is "
            "blocked, or the process is stopped.",
            advice=f"freewheel doctor --pid {last.pid}",
            details=details,
        )
    chain = _chain(status)
    return Explanation(
        doing=doing,
        waiting_for=chain[0] if chain else "Nothing: training computes.",
        because=" ".join(chain[1:]),
        advice=""
        if not chain
        else "Each wait above ends by its own deadline; see docs/exit-codes.md.",
        details=details,
    )


def _chain(status: RunStatus) -> list[str]:
    """From the trainer on: who waits for what, and what those wait for that have it."""
    by_waiter = {wait.waiter: wait for wait in status.waits}
    sentences: list[str] = []
    name: str | None = "train"
    while name in by_waiter:
        wait = by_waiter.pop(name)
        sentences.append(f"{_describe(wait, status.wall_s)}.")
        name = next((h for h in wait.holder.split(", ") if h in by_waiter), None)
    return sentences


def _waits(status: RunStatus) -> tuple[str, ...]:
    return tuple(f"wait: {_describe(wait, status.wall_s)}" for wait in status.waits)


def _describe(wait: Wait, wall_s: float) -> str:
    holder = f", held by {wait.holder}" if wait.holder else ""
    lasted_s = max(0.0, wall_s - wait.since_s)
    return f"{wait.waiter} waits for {wait.resource}, for {duration(lasted_s)}{holder}"


def _reports(folder: RunFolder) -> tuple[str, ...]:
    """The hang reports, oldest first, each with its first sentence."""
    root = folder.path / "hang"
    paths = sorted(root.iterdir()) if root.is_dir() else []
    return tuple(f"report: {path}{_first_line(path / 'summary.txt')}" for path in paths)


def _first_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return f": {lines[0]}" if lines else ""
