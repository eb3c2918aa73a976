"""Text of user code that is not Unicode: kept out of records, and no harm where it is found."""

import asyncio
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freewheel.checkpoint import FileCheckpointStore, read_checkpoint
from freewheel.checkpoint.control_state import control_problem
from freewheel.cli.main import main
from freewheel.config import Config
from freewheel.errors import FailureClass
from freewheel.files import dump_json
from freewheel.rollout.calls import describe
from freewheel.run_folder import RunFolder
from freewheel.status import RunStatus
from freewheel.types import PromptInfo, RolloutOutcome
from freewheel.unicode_text import well_formed
from tests.unit.checkpoint_state import control_state, write_trainer_part

LONE = "unknown tool \ud83d"
CLEAN = "unknown tool \ufffd"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("\u00e9 \U0001f600", "\u00e9 \U0001f600"),
        (LONE, CLEAN),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83dA", "\ufffd\ufffdA"),
        ("\udcff.jsonl", "\ufffd.jsonl"),
    ],
)
def test_lone_surrogates_are_replaced(text, expected):
    assert well_formed(text) == expected


SURROGATES = st.characters(categories=["Cs"])
TEXTS = st.text(st.one_of(SURROGATES, st.characters(), st.sampled_from("\\ud8")), max_size=8)
VALUES = st.recursive(
    st.one_of(TEXTS, st.floats(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


@given(VALUES)
@example({"\ud83d": [float("nan")]})
@example(["\ud83d", "\\ud83d"])
def test_json_of_anything_is_read_by_strict_readers(value):
    from pydantic_core import from_json

    text = dump_json(value)
    assert from_json(text, allow_inf_nan=False) == json.loads(text)


@given(TEXTS.filter(lambda text: text == well_formed(text)))
def test_json_changes_no_text_that_is_unicode(text):
    assert json.loads(dump_json({text: [text]})) == {text: [text]}


def test_messages_between_roles_are_clean():
    outcome = RolloutOutcome(
        sample_id="0-0", attempt=1, failure=FailureClass.ENVIRONMENT, message=LONE, answer=LONE
    )
    assert (outcome.message, outcome.answer) == (CLEAN, CLEAN)
    assert RolloutOutcome(sample_id="0-0", attempt=1).answer is None
    assert PromptInfo(prompt_index=0, num_prompt_tokens=0, message=LONE).message == CLEAN
    assert describe(ValueError(LONE)) == f"ValueError: {CLEAN}"


def test_a_checkpoint_whose_control_state_has_one_is_written_and_read(tmp_path):
    control = control_state(5)
    control["ledger"]["open"][0]["outcomes"]["0"]["message"] = LONE

    async def run():
        store = FileCheckpointStore(tmp_path, keep=2)
        write_trainer_part(await store.begin(5))
        return await store.commit(5, control)

    checkpoint = read_checkpoint(asyncio.run(run()))
    assert checkpoint.control == control
    control["ledger"]["open"][0]["attempts"] = LONE
    assert control_problem(control).startswith("ledger.open.0.attempts: ")


def test_a_status_that_has_one_is_read(tmp_path, capsys):
    status = RunStatus(phase="running", first_failures=(LONE,), dropped_prompts=(LONE,))
    assert RunStatus.from_json(status.to_json()).first_failures == (CLEAN,)
    raw = status.to_json().replace("\\ufffd", "\\ud83d")  # as earlier runs wrote it
    assert RunStatus.from_json(raw).first_failures == (LONE,)
    folder = RunFolder.create(tmp_path / "run", Config())
    folder.write_status(status)
    folder.status_path.write_text(folder.status_path.read_text().replace("\\ufffd", "\\ud83d"))
    assert folder.read_status().status.first_failures == (CLEAN,)
    for command in ("status", "why"):
        assert main([command, str(folder.path)]) == 0
    folder.close()
    assert "Traceback" not in capsys.readouterr().err
