import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.rollout.transcript import Transcript
from freewheel.types import Generation

tokens = st.lists(st.integers(0, 99), max_size=8)


def array(values):
    return np.asarray(values, dtype=np.int32)


def sampled(token_ids, versions):
    return Generation(
        request_id="r",
        token_ids=array(token_ids),
        logprobs=np.linspace(-2, -1, len(token_ids), dtype=np.float32),
        versions=array(versions),
        finish_reason="stop",
    )


@given(prompt=tokens, parts=st.lists(st.tuples(st.booleans(), tokens, st.integers(0, 3))))
def test_the_record_is_what_was_added(prompt, parts):
    transcript = Transcript(max_response_tokens=40)
    transcript.set_prompt(array(prompt))
    wanted = [(token, False, -1) for token in prompt]
    for is_sampled, token_ids, version in parts:
        if is_sampled:
            kept = token_ids[: transcript.num_tokens_left]
            transcript.add_sampled(sampled(kept, [version] * len(kept)))
            wanted += [(token, True, version) for token in kept]
        elif transcript.add_environment(array(token_ids)):
            wanted += [(token, False, -1) for token in token_ids]
        assert transcript.num_tokens_left == 40 - (len(wanted) - len(prompt)) >= 0
    record = transcript.trajectory(sample_id="s", group_id=1, reward=0.5)
    found = zip(record.token_ids, record.loss_mask, record.versions, strict=True)
    assert [(int(t), bool(m), int(v)) for t, m, v in found] == wanted
    assert transcript.num_response_tokens == len(wanted) - len(prompt)
    assert ((record.rollout_logprobs == 0) == ~record.loss_mask).all()
    spans = transcript.version_spans()
    expanded = [version for version, length in spans for _ in range(length)]
    assert expanded == [version for _, mask, version in wanted if mask]
    assert all(a[0] != b[0] for a, b in itertools.pairwise(spans))


def test_what_does_not_fit_is_left_out():
    transcript = Transcript(max_response_tokens=5)
    transcript.set_prompt(array([1]))
    assert transcript.last_token_id == 1
    assert not transcript.add_environment(array([2] * 5))  # it would leave no room for a turn
    assert transcript.finish_reason == "length"
    assert transcript.add_environment(array([2] * 4))
    assert transcript.num_tokens_left == 1


def test_an_empty_record():
    transcript = Transcript(max_response_tokens=5)
    assert transcript.version_spans() == ()
    assert (transcript.num_prompt_tokens, transcript.last_token_id) == (0, -1)
    transcript.set_prompt(array([1]))
    with pytest.raises(ValueError, match="set already"):
        transcript.set_prompt(array([1]))
