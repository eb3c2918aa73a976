"""Errors cross process boundaries whole."""

import copy

import pytest

from freewheel.errors import FailureClass, RolloutError, WeightsLostError


def test_a_rollout_error_keeps_its_class_and_message_when_it_is_rebuilt():
    error = copy.copy(RolloutError(FailureClass.REWARD, "no reward for s1"))
    assert error.failure is FailureClass.REWARD
    assert str(error) == "no reward for s1"


@pytest.mark.parametrize("versions", [(), (3, 5)])
def test_lost_weights_keep_their_versions_when_the_error_is_rebuilt(versions):
    error = copy.copy(WeightsLostError("the node is gone", versions))
    assert type(error) is WeightsLostError
    assert error.versions == versions
    assert str(error) == "the node is gone"
