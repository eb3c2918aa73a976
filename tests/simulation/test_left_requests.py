"""What a lost rollout worker left in the engines is ended: retries do not wait behind it."""

import asyncio

import pytest

from freewheel.errors import FreewheelError
from freewheel.simulation.settings import SimSettings
from tests.simulation.scenarios import VALIDATION_MODES, run_and_check, small_config

LOST_AT_S = 40.0


class LosesItsWorker:
    """Ends the only rollout worker in mid-run, and looks what its replicas do for it afterwards."""

    def __init__(self, *, abort=None):
        self.left = []
        self.abort = abort

    def __call__(self, _controller, backend):
        make = backend.replica

        def replica(replica_id):
            fake = make(replica_id)
            leave = fake.leave

            def noted(request_id, num_tokens):
                leave(request_id, num_tokens)
                self.left.append(num_tokens)

            fake.leave = noted
            if self.abort is not None:
                fake.abort = self.abort(fake)
            return fake

        backend.replica = replica
        asyncio.get_running_loop().call_at(LOST_AT_S, lambda: backend.workers[0].kill())


SETTINGS = SimSettings(seed=3, tokens_per_s=4.0)


@pytest.mark.parametrize("validation_mode", VALIDATION_MODES)
def test_requests_of_a_lost_worker_end_with_it(validation_mode):
    loses, after = LosesItsWorker(), []

    def act(controller, backend):
        loses(controller, backend)

        def look():
            after.extend(replica.num_left for replica in backend.replicas.values())

        asyncio.get_running_loop().call_at(LOST_AT_S + 0.1, look)

    run = run_and_check(small_config("async_partial", validation_mode), SETTINGS, act=act)
    assert run.end.exit_code == 0
    assert max(loses.left) > SETTINGS.tokens_per_s  # else they had ended by themselves
    assert len(after) >= 2
    assert set(after) == {0}


def _never(fake):
    async def abort(_request_id):
        await asyncio.Event().wait()

    return abort


def _fails(fake):
    async def abort(_request_id):
        raise FreewheelError("abort failed: EngineDeadError")

    return abort


def _gone(fake):
    abort = fake.abort

    async def dies(request_id):
        fake.kill()
        await abort(request_id)

    return dies


@pytest.mark.parametrize(
    ("abort", "event"),
    [(_never, "rollout_worker_lost"), (_fails, "replica_lost"), (_gone, "replica_lost")],
)
def test_a_replica_that_does_not_end_them_holds_up_no_one(abort, event):
    acts = LosesItsWorker(abort=abort)
    run = run_and_check(small_config(), SETTINGS, act=acts)
    assert run.end.exit_code == 0
    assert acts.left
    assert event in {row["event"] for row in run.recorder.rows("events")}
