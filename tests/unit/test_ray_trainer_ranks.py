"""Several trainer ranks as one: whose error it is when a collective breaks. No process runs."""

import asyncio

import pytest

from freewheel.backends.ray.actors import Published
from freewheel.backends.ray.proxies import RayTrainer
from freewheel.errors import (
    FreewheelError,
    StartupError,
    TrainerLostError,
    TrainingDivergedError,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

BROKEN = "train_step failed: RuntimeError: Connection closed by peer"


class Rank:
    """A `RemoteProcess` whose process does what a test says.

    `answers`: its calls answer after `delay_s`. `raises`: they raise that. `hangs`: they wait, as
    in a collective that another rank does not join. `dead`: every call is found lost after
    `delay_s`. `silent`: as `hangs`, and nothing else is answered either.
    """

    def __init__(self, name, does="answers", *, error=None, delay_s=0.0, answer=5):
        self.name = name
        self.pid = 7
        self.waiting_for = ""
        self.is_killed = False
        self.num_cancelled = 0
        self.sent = []
        self._does, self._error, self._delay_s, self._answer = does, error, delay_s, answer

    async def place(self):
        pass

    async def start(self, *args):
        """As the real one: the process is killed when its start fails or is given up."""
        try:
            return await self.call("start", *args)
        except BaseException as error:
            self.kill()
            if type(error) is FreewheelError:
                raise StartupError(str(error)) from error
            raise

    def submit(self, method, *args, num_returns=1):
        self.sent.append((method, *args))
        return f"{method} on {self.name}", "ref"

    async def answer(self, ref, method):
        return await self.call(method)

    async def call(self, method, *args):
        if method == "rendezvous":
            return "tcp://here"
        if self.is_killed:
            raise TrainerLostError(f"{self.name}: was killed")
        try:
            return await self._act("answers" if self._lives_for(method) else self._does)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def _lives_for(self, method):
        return method == "identify" and self._does not in ("dead", "silent")

    async def _act(self, does):
        await asyncio.sleep(self._delay_s)
        if does == "raises":
            raise self._error
        if does == "dead":
            raise TrainerLostError(f"{self.name}: the process is gone")
        if does in ("hangs", "silent"):
            await asyncio.Event().wait()
        return self._answer

    def kill(self):
        self.is_killed = True


def _breaks(name="trainer-0", error=None):
    return Rank(name, "raises", error=error or FreewheelError(BROKEN))


CALLS = {
    "train_step": lambda trainer: trainer.train_step("request"),
    "publish": lambda trainer: trainer.publish(3),
    "copy_state": lambda trainer: trainer.copy_state(4),
    "start": lambda trainer: trainer.start(None),
}


async def _fails(call, *ranks, grace_s=5.0):
    with pytest.raises(FreewheelError) as caught:
        await CALLS[call](RayTrainer(ranks, grace_s=grace_s))
    return caught.value


@pytest.mark.parametrize("call", CALLS)
async def test_a_lost_rank_is_the_cause_of_what_the_others_raise(call):
    first, third = _breaks(), _breaks("trainer-2")
    error = await _fails(call, first, Rank("trainer-1", "dead", delay_s=0.05), third)
    assert type(error) is TrainerLostError
    assert "trainer-1: the process is gone" in str(error)


@pytest.mark.parametrize("call", ["train_step", "start"])
async def test_the_loss_of_the_first_rank_is_seen_by_the_second(call):
    error = await _fails(call, Rank("trainer-0", "dead", delay_s=0.05), _breaks("trainer-1"))
    assert type(error) is TrainerLostError
    assert "trainer-0" in str(error)


@pytest.mark.parametrize("call", CALLS)
async def test_an_error_of_a_rank_stays_its_own_while_the_others_live(call):
    waits = Rank("trainer-1", "hangs")
    error = await _fails(call, _breaks(), waits)
    assert type(error) is (StartupError if call == "start" else FreewheelError)
    assert BROKEN in str(error)
    assert waits.num_cancelled == 1


async def test_ranks_that_fail_alike_at_start_are_not_lost():
    ranks = [_breaks(f"trainer-{i}", FreewheelError("no such layer")) for i in range(3)]
    error = await _fails("start", *ranks)
    assert type(error) is StartupError
    assert "no such layer" in str(error)


async def test_a_rank_that_does_not_answer_is_lost():
    error = await _fails("train_step", _breaks(), Rank("trainer-1", "silent"), grace_s=0.05)
    assert type(error) is TrainerLostError
    assert "trainer-1: no answer within 0.05 s" in str(error)


async def test_errors_that_say_what_is_wrong_are_not_asked_about():
    diverged = _breaks(error=TrainingDivergedError("loss is nan"))
    error = await _fails("train_step", diverged, Rank("trainer-1", "silent"), grace_s=60)
    assert type(error) is TrainingDivergedError


async def test_one_rank_alone_has_no_other_cause():
    assert type(await _fails("train_step", _breaks(), grace_s=60)) is FreewheelError


async def test_answers_come_by_rank():
    about = [Published(num_bytes=5), Published(num_bytes=0)]
    first, second = Rank("trainer-0", delay_s=0.02, answer=about[0]), Rank("1", answer=about[1])
    trainer = RayTrainer([first, second], grace_s=5)
    assert (await trainer.publish(3)).num_bytes == 5
    assert await trainer.train_step("request") == about[0]


async def test_weights_in_the_memory_of_rank_0_are_dropped_there_unless_it_is_gone():
    first = Rank("trainer-0", answer=Published(num_bytes=5, publication=8))
    second = Rank("trainer-1", answer=Published(num_bytes=0))
    trainer = RayTrainer([first, second], grace_s=5)
    for version in (3, 4):
        weights = await trainer.publish(version)
        del weights
        assert first.sent[-1] == ("drop_weights", 8)
        assert len(second.sent) == version - 2
    weights = await trainer.publish(5)
    trainer.kill()
    del weights
    assert first.sent[-1] == ("publish", 5)
