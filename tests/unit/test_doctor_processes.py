"""The doctor's patterns of threads, whole processes and ranks, on stacks made for the purpose."""

from dataclasses import replace

import pytest

from freewheel.doctor import Certainty, judge
from freewheel.doctor.patterns_distributed import waiting_collectives
from freewheel.doctor.patterns_process import dead_loader_workers, gil_suspect, held_gil, lock_waits
from freewheel.doctor.sources import lock_expressions
from freewheel.doctor.stacks import Child, Sample, Syscall
from tests.unit.doctor_stacks import FUTEX, LOOP, RESULT, frames, process, thread, with_history

ALL_REDUCE = """
all_reduce (torch/distributed/distributed_c10d.py:2825)
wrapper (torch/distributed/c10d_logger.py:83)
sync (train.py:8)
"""
LOADER = """
poll (multiprocessing/connection.py:9)
get (multiprocessing/queues.py:9)
_try_get_data (torch/utils/data/dataloader.py:9)
_next_data (torch/utils/data/dataloader.py:99)
main (train.py:9)
"""


def holding(one, expression):
    """The thread with its outermost frame inside a `with` block."""
    outer = replace(one.frames[-1], held=(expression,))
    return replace(one, frames=(*one.frames[:-1], outer))


def waiter(expression, *, number=2, name="waiter", inside=None):
    one = thread(
        "B.take (app.py:20)", number=number, name=name, sources={"B.take": f"with {expression}:"}
    )
    return holding(one, inside) if inside else one


def holder(expression):
    return holding(
        thread("sleep (lib.py:3)\nB.work (app.py:9)", number=3, name="holder"), expression
    )


def test_a_lock_that_is_seen_to_be_held():
    (one,) = lock_waits(process(waiter("self.lock"), holder("self.lock")))
    assert (one.pattern, one.certainty) == ("lock-held", Certainty.LIKELY)
    assert "'holder'" in one.title
    assert str(one.holder) == "B.work (app.py:9)"


def test_no_holder_is_claimed_that_is_not_seen():
    assert lock_waits(process(waiter("self.lock"), holder("self.other"))) == []
    assert lock_waits(process(waiter("self.lock"))) == []
    elsewhere = holding(thread("A.work (other.py:9)", number=3), "self.lock")
    assert lock_waits(process(waiter("self.lock"), elsewhere)) == []
    other_class = holding(thread("A.work (app.py:9)", number=3), "self.lock")
    assert lock_waits(process(waiter("self.lock"), other_class)) == []


def test_a_holder_that_moves_is_left_alone():
    now = process(waiter("self.lock"), holder("self.lock"))
    before = thread("B.work (app.py:8)", number=3, name="holder")
    assert lock_waits(with_history(now, (waiter("self.lock"), before))) == []


def test_two_locks_taken_in_both_orders_are_told_once():
    one = waiter("self.a", number=2, name="forth", inside="self.b")
    two = waiter("self.b", number=3, name="back", inside="self.a")
    (found,) = lock_waits(process(one, two))
    assert found.pattern == "lock-cycle"
    assert "'forth'" in found.title
    assert "'back'" in found.title


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("with self.lock:", ("self.lock",)),
        ("with first, self.second as s:", ("first", "self.second")),
        ("if not self.lock.acquire(timeout=3):", ("self.lock",)),
        ("with locks['a']:", ("locks['a']",)),
        ("with open(path) as file:", ()),
        ("with (", ()),
        ("x = 3", ()),
        ("", ()),
    ],
)
def test_what_a_line_takes(source, expected):
    assert lock_expressions(source) == expected


def gil_process(*, lets_go=False, wakeups=300, syscall=FUTEX):
    owner = thread("work (app.py:3)", owns_gil=True, num_switches=100 if lets_go else 0)
    starved = thread(f"work (app.py:9)\n{LOOP}", number=2, name="loop", num_switches=wakeups)
    starved = replace(starved, syscall=syscall)
    before = (replace(owner, num_switches=0), replace(starved, num_switches=0))
    return with_history(process(owner, starved), before, before)


def native_sample(*tops):
    text = "\n".join((*tops, "work (app.py:3)"))
    return Sample(time_s=9.0, threads=(thread(text, owns_gil=True),))


MATCH = ("count (sre.so:1)", "match (sre.so:2)")


def test_a_native_call_that_keeps_the_interpreter_lock():
    samples = (native_sample(*MATCH), native_sample("other (sre.so:8)", MATCH[1]))
    (one,) = held_gil(gil_process(), samples)
    assert one.certainty is Certainty.LIKELY
    assert "other < match" in one.title
    assert "'loop'" in one.why


@pytest.mark.parametrize(
    "healthy",
    [
        gil_process(lets_go=True),
        gil_process(wakeups=10),
        gil_process(syscall=Syscall(name="epoll")),
        process(thread("work (app.py:3)", owns_gil=True)),
    ],
)
def test_a_lock_that_is_let_go_or_that_no_one_wants_is_no_suspicion(healthy):
    assert gil_suspect(healthy) is None
    assert held_gil(healthy, (native_sample(*MATCH), native_sample(*MATCH))) == []


def test_without_one_native_call_on_top_nothing_is_claimed():
    assert held_gil(gil_process(), (native_sample(), native_sample())) == []
    assert held_gil(gil_process(), (native_sample(*MATCH), native_sample("sort (np.so:1)"))) == []
    assert held_gil(gil_process()) == []


@pytest.mark.parametrize(
    ("children", "expected"),
    [
        ([("pt_data_worker", "Z"), ("pt_data_worker", "S")], "certain"),
        ([("python", "Z")], "likely"),
        ([("pt_data_worker", "T")], "certain"),
        ([], "likely"),
        ([("pt_data_worker", "S")], None),
        (None, None),
    ],
)
def test_workers_of_a_data_loader(children, expected):
    if children is not None:
        children = tuple(
            Child(pid=90 + index, name=name, state=state)
            for index, (name, state) in enumerate(children)
        )
    found = dead_loader_workers(process(thread(LOADER), children=children))
    assert [one.certainty for one in found] == ([expected] if expected else [])


def test_a_stopped_process_is_told_as_such_and_nothing_else():
    blocked = thread(f"{RESULT}\nwork (app.py:5)\n{LOOP}")
    examination = judge([process(blocked, state="T")])
    assert [one.pattern for one in examination.findings] == ["process-stopped"]


def rank(stack, pid, command="python train.py", **facts):
    return process(thread(stack, **facts), pid=pid, command=command)


def test_a_rank_alone_may_only_have_slow_peers():
    (one,) = waiting_collectives([rank(ALL_REDUCE, 1)])
    assert (one.pattern, one.certainty) == ("collective-waits", Certainty.POSSIBLE)
    assert one.evidence.name == "all_reduce"
    assert one.caller.name == "sync"


def test_the_rank_that_is_elsewhere_is_named():
    (one,) = waiting_collectives([rank(ALL_REDUCE, 1), rank("save (train.py:30)", 2)])
    assert one.certainty is Certainty.LIKELY
    assert "(pid 2) is elsewhere: main thread at save (train.py:30)" in one.why


def test_ranks_in_different_collectives():
    gather = ALL_REDUCE.replace("all_reduce", "all_gather")
    one, two = waiting_collectives([rank(ALL_REDUCE, 1), rank(gather, 2)])
    assert "is in another one: all_gather" in one.why
    assert one.certainty is two.certainty is Certainty.LIKELY


def test_other_programs_are_no_ranks_of_it():
    other = rank("serve (serve.py:1)", 2, command="python serve.py")
    (one,) = waiting_collectives([rank(ALL_REDUCE, 1), other])
    assert one.certainty is Certainty.POSSIBLE


def test_native_frames_of_nccl_are_recognised():
    stack = "ncclGroupEnd (libnccl.so:0)\nstep (train.py:3)"
    (one,) = waiting_collectives([rank(stack, 1, active=True)])
    assert one.evidence.name == "ncclGroupEnd"


def test_a_rank_that_waits_for_others_to_join():
    stack = """
    _create_c10d_store (torch/distributed/rendezvous.py:9)
    rendezvous (torch/distributed/rendezvous.py:99)
    init_process_group (torch/distributed/distributed_c10d.py:1700)
    main (train.py:3)
    """
    (one,) = waiting_collectives([rank(stack, 1)])
    assert one.pattern == "process-group-incomplete"
    assert one.evidence.name == "init_process_group"


def test_a_rank_that_computes_is_left_alone():
    assert (
        waiting_collectives([rank("forward (torch/nn/modules/linear.py:3)\nstep (train.py:3)", 1)])
        == []
    )


def test_frames_know_whose_code_they_are():
    texts = [
        "a (/usr/lib/python3.11/queue.py:1)",
        "a (/venv/lib/python3.11/site-packages/ray/worker.py:1)",
        "a (/home/me/queue.py:1)",
        "a (queue.py:1)",
        "a (ray/worker.py:1)",
        "a (app.py:1)",
        "a (<frozen importlib._bootstrap>:1)",
        "a (<string>:1)",
    ]
    origins = [frames(text)[0].origin for text in texts]
    assert origins == [
        "stdlib", "library", "user", "stdlib", "library", "user", "stdlib", "user",
    ]  # fmt: skip
    assert frames(texts[1])[0].tail == "ray/worker.py"
