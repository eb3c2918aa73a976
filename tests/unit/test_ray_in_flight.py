"""What a replica has of a group is found by the group's id; a group given up gets no more."""

import numpy as np
import pytest

from freewheel.backends.ray.in_flight import RequestsInFlight
from freewheel.errors import FailureClass, RolloutError
from freewheel.types import GenerationRequest, SamplingParams


def requests(*request_ids):
    prompt = np.zeros(3, dtype=np.int32)
    sampling = SamplingParams(max_tokens=4)
    return [
        GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
        for name in request_ids
    ]


def test_only_the_requests_of_the_group_that_still_run_are_given_up():
    known = RequestsInFlight()
    of_group = requests("training-1/7-0/0", "training-1/7-1/0")
    others = requests("training-12/9-0/0", "validation-1/7-0/0")
    with known.running(of_group), known.running(others):
        with known.running(requests("training-1/7-2/0")):
            pass
        assert known.give_up("training-1") == ["training-1/7-0/0", "training-1/7-1/0"]
    assert known.give_up("training-1") == known.give_up("training-12") == []


def test_a_request_that_failed_is_over():
    known = RequestsInFlight()
    with pytest.raises(ValueError, match="x"), known.running(requests("training-1/7-0/0")):
        raise ValueError("x")
    assert known.give_up("training-1") == []


def test_what_arrives_of_a_group_that_was_given_up_is_refused():
    known = RequestsInFlight()
    known.give_up("training-1")
    refused = pytest.raises(RolloutError, match="training-1/7-0/1: its group was given up")
    with refused as caught, known.running(requests("training-1/7-0/1")):
        pytest.fail("it was let in")
    assert caught.value.failure is FailureClass.LOST_WORKER
    with known.running(requests("training-12/9-0/0")):
        assert known.give_up("training-12") == ["training-12/9-0/0"]
