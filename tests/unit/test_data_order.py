import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.order import PromptOrder
from freewheel.errors import DataError


def epoch_of(order: PromptOrder, epoch: int) -> list[int]:
    size = order.num_prompts
    found = [order.prompt_at(cursor) for cursor in range(epoch * size, (epoch + 1) * size)]
    assert {number for number, _ in found} == {epoch}
    return [index for _, index in found]


@given(size=st.integers(1, 200), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(epoch_of(PromptOrder(size, seed, True), epoch)) == list(range(size))


@given(size=st.integers(1, 50), seed=st.integers(0, 99), cursors=st.lists(st.integers(0, 500)))
def test_a_cursor_means_the_same_prompt_whatever_was_asked_before(size, seed, cursors):
    used = PromptOrder(size, seed, True)
    for cursor in cursors:
        assert used.prompt_at(cursor) == PromptOrder(size, seed, True).prompt_at(cursor)


def test_epochs_and_seeds_differ():
    order, other = PromptOrder(100, 7, True), PromptOrder(100, 8, True)
    assert len({tuple(epoch_of(order, epoch)) for epoch in range(5)}) == 5
    assert epoch_of(order, 0) != epoch_of(other, 0)


def test_without_shuffle_the_order_is_that_of_the_data():
    assert epoch_of(PromptOrder(4, 1, False), 3) == [0, 1, 2, 3]


def test_the_order_does_not_change_between_releases():
    # A resumed run relies on it.
    assert epoch_of(PromptOrder(6, 5, True), 2) == [4, 0, 1, 5, 2, 3]
    assert epoch_of(PromptOrder(5, 1, True), 0) == [2, 4, 0, 3, 1]


def test_only_neighbouring_epochs_are_kept():
    order = PromptOrder(10, 1, True)
    for epoch in range(20):
        order.prompt_at(epoch * 10)
        assert len(order._permutations) <= 3


def test_no_prompts_and_negative_cursors_are_refused():
    with pytest.raises(DataError, match="num_prompts is 0"):
        PromptOrder(0, 1, True)
    with pytest.raises(ValueError, match="-1"):
        PromptOrder(1, 1, True).prompt_at(-1)


def test_prompts_are_spread_evenly_over_the_epoch():
    order = PromptOrder(64, 3, True)
    first = [epoch_of(order, epoch)[0] for epoch in range(2000)]
    # Each prompt is first 31 times on average; 5 standard deviations on both sides.
    assert all(4 <= first.count(prompt) <= 59 for prompt in range(64))
