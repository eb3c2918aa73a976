"""Errors cross process boundaries whole."""

import copy

from freewheel.errors import FailureClass, RolloutError


def test_a_rollout_error_keeps_its_class_and_message_when_it_is_rebuilt():
    error = copy.copy(RolloutError(FailureClass.REWARD, "no reward for s1"))
    assert error.failure is FailureClass.REWARD
    assert str(error) == "no reward for s1"
