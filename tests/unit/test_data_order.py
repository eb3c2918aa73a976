import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.data.order import PromptOrder
from freewheel.errors import DataError


def epoch_of(order: PromptOrder, epoch: int) -> list[int]:
    size = order.num_prompts
    found = [order.prompt_at(cursor) for cursor in range(epoch * size, (epoch + 1) * size)]
    assert {number for number, _ in found} == {epoch}
    return [index for _, index in found]


@settings(deadline=None)
@given(size=st.integers(1, 200), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(epoch_of(PromptOrder(size, seed, True), epoch)) == list(range(size))


@settings(deadline=None)
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
    assert epoch_of(PromptOrder(6, 5, True), 2) == [0, 3, 4, 2, 1, 5]
    assert epoch_of(PromptOrder(5, 1, True), 0) == [1, 0, 4, 2, 3]


@pytest.mark.parametrize("size", [*range(1, 70), 997, 4096, 10_007])
def test_each_epoch_is_a_bijection(size):
    order = PromptOrder(size, 11, True)
    assert sorted(epoch_of(order, 3)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_prompts_are_about_equally_likely(size):
    order = PromptOrder(size, 2, True)
    num_orders, num_epochs = math.factorial(size), 60 * math.factorial(size)
    counts = Counter(tuple(epoch_of(order, epoch)) for epoch in range(num_epochs))
    assert len(counts) == num_orders
    # 60 of each on average; 6 standard deviations on both sides.
    assert all(13 <= count <= 107 for count in counts.values()), counts


def test_neighbours_do_not_stay_together():
    size = 10_000
    places = epoch_of(PromptOrder(size, 4, True), 0)
    steps = [abs(one - other) for one, other in itertools.pairwise(places)]
    # Two independent places are a third of the size apart; 8 standard deviations on both sides.
    assert abs(sum(steps) / len(steps) / size - 1 / 3) < 8 * 0.236 / len(steps) ** 0.5


def test_a_place_of_a_huge_epoch_needs_no_array():
    size = 10**15
    found = PromptOrder(size, 1, True)
    indices = {found.prompt_at(cursor)[1] for cursor in range(1000)}
    assert len(indices) == 1000
    assert max(indices) < size
    assert max(indices) > size // 2 > min(indices)


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
