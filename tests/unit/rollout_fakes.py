"""A tokenizer of bytes with a chat template, and an engine that does what a test tells it."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from freewheel.config.sections import (
    Config,
    DataConfig,
    HealthConfig,
    RolloutConfig,
    ValidationConfig,
)
from freewheel.errors import ReplicaLostError
from freewheel.rollout.worker import RolloutWorkerCore
from freewheel.types import (
    Generation,
    GenerationRequest,
    GroupRequest,
    Member,
    Purpose,
    SamplingParams,
    Split,
)
from tests.unit import rollout_usercode as user

TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'alien' %}{{ raise_exception('no role alien') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE, bos: bool = False) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, additional_special_tokens=["<|im_start|>"]
    )
    if bos:
        from tokenizers.processors import TemplateProcessing

        fast.add_special_tokens({"bos_token": "<s>"})
        ids = fast.convert_tokens_to_ids(["<s>", END])
        fast._tokenizer.post_processor = TemplateProcessing(
            single=f"<s> $A {END}", special_tokens=[("<s>", ids[0]), (END, ids[1])]
        )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


class FakeEngine:
    """A Generator. `answer(request)` gives text, or a Generation, or waits, or raises."""

    def __init__(self, answer: "Callable[[GenerationRequest], object]", encode) -> None:
        self.answer = answer
        self.encode = encode
        self.calls: list[list[GenerationRequest]] = []
        self.timeouts: list[float] = []
        self.aborted: list[str] = []
        self.lost = False

    async def generate(
        self, requests: Sequence[GenerationRequest], *, timeout_s: float
    ) -> list[Generation]:
        self.calls.append(list(requests))
        self.timeouts.append(timeout_s)
        if self.lost:
            raise ReplicaLostError("replica 3 is gone")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def _one(self, request: GenerationRequest) -> Generation:
        answer = self.answer(request)
        if isinstance(answer, Awaitable):
            answer = await answer
        if isinstance(answer, Generation):
            return answer
        return generation(request, self.encode(answer))

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids


def generation(request, token_ids, *, versions=None, finish_reason="stop") -> Generation:
    cut = list(token_ids)[: request.sampling.max_tokens]
    reason = finish_reason if len(cut) == len(token_ids) else "length"
    length = len(cut)
    return Generation(
        request_id=request.request_id,
        token_ids=np.asarray(cut, dtype=np.int32),
        logprobs=-np.arange(1, length + 1, dtype=np.float32),
        versions=np.asarray(versions if versions is not None else [4] * length, dtype=np.int32),
        finish_reason=reason,
    )


def config_for(folder: Path, rows, **rollout) -> Config:
    data = {k.removeprefix("data_"): rollout.pop(k) for k in list(rollout) if k.startswith("data_")}
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    health = HealthConfig(**rollout.pop("health", {}))
    validation = ValidationConfig(**rollout.pop("validation", {}))
    values = {"max_prompt_length": 200, "max_response_length": 200, **rollout}
    return Config(
        data=DataConfig(train_files=str(path), **data),
        rollout=RolloutConfig(**values),
        health=health,
        validation=validation,
    )


def group_request(num_members=2, *, max_tokens=200, timeout_s=20.0, **fields) -> GroupRequest:
    values = {
        "request_id": "r7",
        "group_id": 12,
        "split": Split.TRAIN,
        "purpose": Purpose.TRAINING,
        "prompt_index": 0,
        "members": tuple(
            Member(sample_id=f"s{i}", attempt=0, seed=100 * i) for i in range(num_members)
        ),
        "sampling": SamplingParams(max_tokens=max_tokens, temperature=0.7),
        "timeout_s": timeout_s,
    }
    return GroupRequest(**{**values, **fields})


class Bench:
    """A started worker and the tokenizer, for a test's use."""

    def __init__(self, worker: RolloutWorkerCore, encode, decode, reports=()) -> None:
        self.worker = worker
        self.reports = reports
        self.encode = encode
        self.decode = decode

    def engine(self, answer) -> FakeEngine:
        return FakeEngine(answer, self.encode)


@contextlib.asynccontextmanager
async def open_bench(folder, tokenizer, rows, *, environment="single_turn", **rollout):
    """A started worker; environments are of `rollout_usercode`."""
    if environment != "single_turn" and ":" not in environment:
        environment = f"{user.__name__}:{environment}"
    config = config_for(folder, rows, environment=environment, **rollout)
    reports = []
    worker = RolloutWorkerCore(config, tokenizer, 0, on_loop_report=reports.append)
    await worker.start()
    renderer = worker._services.renderer
    try:
        yield Bench(worker, lambda text: renderer.text(text).tolist(), renderer.decode, reports)
    finally:
        user.RELEASE.set()
        await worker.close()


async def until(condition, limit_s=5.0):
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  # conditions in other threads
            await asyncio.sleep(0.01)


def failures(outcomes):
    return [outcome.failure for outcome in outcomes]
