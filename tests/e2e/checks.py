"""What holds in every run folder, beside the audit."""

from collections import Counter

from tests.e2e.runs import Finished


def check_samples(run: Finished, *, group_size: int = 4) -> None:
    rows = run.rows("samples")
    assert max(Counter(row["sample_id"] for row in rows).values()) == 1
    groups: dict[int, tuple[int, int]] = {}
    for row in rows:
        groups[row["group_id"]] = (row["epoch"], row["prompt_index"])
    assert len(rows) == group_size * len(groups)
    assert max(Counter(groups.values()).values()) == 1


def check_validations(run: Finished) -> None:
    for row in run.rows("validations"):
        if row["status"] != "skipped":
            assert row["response_versions"] == {str(row["policy_version"]): row["n_done"]}
