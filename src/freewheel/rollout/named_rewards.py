"""The rewards that have a name. They are plain functions with the signature of a user's own.

Each returns a `RewardResult` whose `answer` is what majority@n votes on, None where there is none.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

_NUMBER = re.compile(
    r"(?:(?<![\w)\].])[-+\u2212])?(?<![\d.])(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))"
    r"(?:[eE][-+]?\d+)?"
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A reward, and the answer that it judged (None when it judged the whole response)."""

    reward: float
    answer: str | None = None


def exact_match(response: str, ground_truth: object, *, ignore_case: bool = False) -> RewardResult:
    """1 if the response, without surrounding white space, is the ground truth (or one of them)."""

    def normal(value: object) -> str:
        text = str(value).strip()
        return text.casefold() if ignore_case else text

    truths = cast(
        "list[object]", ground_truth if isinstance(ground_truth, list) else [ground_truth]
    )
    answer = normal(response)
    return RewardResult(reward=float(answer in {normal(truth) for truth in truths}), answer=answer)


def numeric_match(response: str, ground_truth: object, *, tolerance: float = 1e-6) -> RewardResult:
    """1 if the last number in the response is the ground truth's, within a relative tolerance.

    Of a text, the ground truth is its last number (`#### 42`).

    Raises:
        ValueError: the ground truth has no number.
    """
    wanted = last_number(str(ground_truth))
    if wanted is None:
        raise ValueError(f"no number in the ground truth {ground_truth!r}")
    found = last_number(response)
    if found is None:
        return RewardResult(reward=0.0)
    right = math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return RewardResult(reward=float(right), answer=f"{found:.12g}")


def regex(
    response: str, ground_truth: object, *, pattern: str, group: int | str | None = None
) -> RewardResult:
    """1 if what the pattern's last match captures is the ground truth, white space aside.

    Args:
        response: the response.
        ground_truth: compared as text.
        pattern: of Python's `re`; `.` matches line breaks too.
        group: number or name of the group; unset: the first, or all of a pattern without groups.
    """
    compiled = re.compile(pattern, re.DOTALL)
    chosen = group if group is not None else min(compiled.groups, 1)
    matches = list(compiled.finditer(response))
    if not matches:
        return RewardResult(reward=0.0)
    answer = (matches[-1].group(chosen) or "").strip()
    return RewardResult(reward=float(answer == str(ground_truth).strip()), answer=answer)


def reasoning_gym(
    response: str,
    ground_truth: object,
    *,
    extra: dict[str, Any],
    extract: str = "tag",
    pattern: str = "",
) -> RewardResult:
    """The score of the task's own scorer, from 0 to 1.

    Args:
        response: the response.
        ground_truth: not used; the scorer has the whole entry.
        extra: the record's; a row of a file needs reasoning-gym's `metadata` column.
        extract: what of the response is the answer: `tag`, the last `<answer>...</answer>`, or all
            of it if there is none; `last_line`; `last_number`; `whole`.
        pattern: instead, the first group (or all) of this pattern's last match.
    """
    answer = _extract(response, extract, pattern)
    if answer is None:
        return RewardResult(reward=0.0)
    score_answer, entry = _scorer(extra, ground_truth)
    return RewardResult(reward=float(score_answer(answer, entry)), answer=answer)


def last_number(text: str) -> float | None:
    """The last number in a text, thousands commas and exponents included; None without one."""
    matches = [match.group() for match in _NUMBER.finditer(text) if match.group()]
    if not matches:
        return None
    value = float(matches[-1].replace(",", "").replace("\u2212", "-"))
    return value if math.isfinite(value) else None


def _extract(response: str, extract: str, pattern: str) -> str | None:
    if pattern:
        compiled = re.compile(pattern, re.DOTALL)
        matches = list(compiled.finditer(response))
        return (matches[-1].group(min(compiled.groups, 1)) or "").strip() if matches else None
    if extract == "last_number":
        number = last_number(response)
        return None if number is None else f"{number:.12g}"
    if extract == "last_line":
        lines = response.strip().splitlines()
        return lines[-1].strip() if lines else None
    if extract == "tag" and (tags := _TAG.findall(response)):
        return str(tags[-1]).strip()
    return response.strip()


def _scorer(
    extra: dict[str, Any], ground_truth: object
) -> tuple[Callable[[str, dict[str, Any]], float], dict[str, Any]]:
    if "score_answer" in extra:
        return extra["score_answer"], extra["reasoning_gym"]
    metadata = extra.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise ValueError(
            "the record is not reasoning-gym's: it has no 'metadata' with 'source_dataset', only "
            f"{', '.join(extra) or 'no other column'}"
        )
    import reasoning_gym as package

    entry = {"question": "", "answer": ground_truth, "metadata": metadata}
    score_answer: Any = package.get_score_answer_fn(str(metadata["source_dataset"]))
    return score_answer, entry
