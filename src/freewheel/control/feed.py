"""Prompts in their order, tokenized ahead by a rollout worker, handed to the rollouter.

The cursor is a plain number: the place of a prompt in the endless sequence of shuffled epochs. It
is the id of the prompt's group, too, so that a resumed run goes on at `ledger.next_group_id`.
"""

import asyncio
from dataclasses import dataclass

from freewheel.config.sections import Config
from freewheel.control.waits import Channel, WaitTable
from freewheel.control.worker_pool import WorkerPool
from freewheel.data.order import PromptOrder
from freewheel.errors import InvariantError, RolloutWorkerLostError
from freewheel.types import PromptInfo, Split

CHUNK = 32
"""Prompts tokenized in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPrompt:
    """The prompt at one place of the sequence."""

    cursor: int
    epoch: int
    prompt: PromptInfo


class Feed:
    """Loop `feed`. See the module's docstring."""

    def __init__(self, config: Config, *, workers: WorkerPool, waits: WaitTable) -> None:
        self.prompts: Channel[QueuedPrompt] = Channel(2 * CHUNK)
        self.num_prompts = 0
        self._config = config
        self._workers = workers
        self._waits = waits

    async def run(self, cursor: int) -> None:
        """Feed prompts from a place of the sequence on.

        Consumes: the data's order.
        Produces: prompts, then the end of the channel (with `total_training_steps` there is none).
        Waits for: the first rollout worker; a worker's tokenizing; room in the channel.
        Unblocked by: rollout workers, the rollouter.
        """
        info = await self._workers.dataset(Split.TRAIN, "feed")
        if info is None:
            raise InvariantError("a rollout worker came up without training prompts")
        self.num_prompts = info.num_prompts
        trainer = self._config.trainer
        order = PromptOrder(info.num_prompts, trainer.seed, self._config.data.shuffle)
        end = (
            None
            if trainer.total_training_steps is not None
            else trainer.total_epochs * info.num_prompts
        )
        while end is None or cursor < end:
            stop = cursor + CHUNK if end is None else min(cursor + CHUNK, end)
            places = [order.prompt_at(place) for place in range(cursor, stop)]
            prompts = await self._prepare([index for _, index in places])
            for (epoch, _), prompt in zip(places, prompts, strict=True):
                await self._put(QueuedPrompt(cursor=cursor, epoch=epoch, prompt=prompt))
                cursor += 1
        self.prompts.close()

    async def _put(self, prompt: QueuedPrompt) -> None:
        if not self.prompts.put_nowait(prompt):
            with self._waits.waiting("feed", "room for prompts", held_by=("rollouter",)):
                await self.prompts.put(prompt)

    async def _prepare(self, indices: list[int]) -> list[PromptInfo]:
        """Tokenize a chunk; a worker that is lost or too slow is reported, another one asked."""
        limit_s = self._config.health.prepare_timeout_s
        while True:
            worker = await self._workers.choose("feed")
            name = f"rollout-worker-{worker.worker_id}"
            try:
                with self._waits.waiting("feed", "prompts", held_by=(name,), timeout_s=limit_s):
                    async with asyncio.timeout(limit_s):
                        return await worker.prepare(Split.TRAIN, indices)
            except TimeoutError:
                reason = f"prompts not tokenized within {limit_s:g} s (health.prepare_timeout_s)"
            except RolloutWorkerLostError as error:
                reason = str(error)
            self._workers.report_lost(worker, reason)
