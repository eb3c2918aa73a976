"""What the contract suites are run on: the model, its versions, and one way to drive any engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from freewheel.config.sections import Config, RolloutConfig
from freewheel.types import Generation, GenerationRequest, ReplicaStats, SamplingParams
from freewheel.weights import WeightBundle, pack_weights

VOCAB = 61
"""Not a multiple of what engines pad to."""
LETTERS = [chr(ord("!") + i) for i in range(VOCAB - 4)]
MAX_PROMPT, MAX_RESPONSE = 64, 2000


class Subject(Protocol):
    """A replica to be judged. Its weights of version v are those of `make_model(v)`."""

    async def update(self, version: int) -> None: ...

    async def sample(self, num_tokens: int) -> list[int]:
        """Versions of so many tokens, sampled now."""
        ...

    async def under_way(self) -> None:
        """Return when a request has some of its tokens."""
        ...

    async def stats(self) -> ReplicaStats: ...

    async def kill(self) -> None:
        """End what samples, as a crash would."""
        ...


class Core(Protocol):
    """What a replica's process holds: the embedded engine's and vLLM's common face."""

    async def start(self) -> None: ...
    async def generate(
        self, requests: Sequence[GenerationRequest], *, timeout_s: float
    ) -> list[Generation]: ...
    async def abort(self, request_ids: Sequence[str]) -> None: ...
    async def update_weights(self, version: int, bundle: WeightBundle) -> None: ...
    def stats(self) -> ReplicaStats: ...
    async def aclose(self) -> None: ...


class CoreSubject:
    """A core as a subject."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._number = 0

    async def update(self, version: int) -> None:
        await self.core.update_weights(version, bundle(version))

    async def sample(self, num_tokens: int) -> list[int]:
        self._number += 1
        item = request(f"sample-{self._number}", [5, 6, 7], max_tokens=num_tokens)
        (result,) = await self.core.generate([item], timeout_s=120)
        return result.versions.tolist()

    async def under_way(self) -> None:
        await more_tokens(self.core, 10)

    async def stats(self) -> ReplicaStats:
        return self.core.stats()

    async def kill(self) -> None:
        await self.core.aclose()


async def more_tokens(core: Core, count: int) -> None:
    """Return when the engine has sampled so many more tokens."""
    wanted = core.stats().num_generated_tokens + count
    await until(lambda: core.stats().num_generated_tokens >= wanted)


async def until(condition: Any, timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the state is another process's: no event
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def in_flight(core: Core, *items: GenerationRequest) -> AsyncIterator[asyncio.Task[Any]]:
    """A call of `generate` beside the block; the block sees to its end."""
    async with asyncio.TaskGroup() as group:
        call = group.create_task(core.generate(items, timeout_s=120))
        await more_tokens(core, 4)
        yield call


def config(engine: str, **rollout: Any) -> Config:
    settings: dict[str, Any] = {
        "max_prompt_length": MAX_PROMPT,
        "max_response_length": MAX_RESPONSE,
        "max_num_seqs": 16,
        "kv_cache_bytes": 1 << 26,
    }
    return Config(rollout=RolloutConfig(engine=engine, device="cpu", **(settings | rollout)))


def hf_config(*, eos: int | None = None) -> LlamaConfig:
    """Tied embeddings: the hardest to update in place. Head size 32: the smallest vLLM takes."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=eos,
        pad_token_id=2,
        initializer_range=0.3,
    )


def make_model(version: int) -> Any:
    """The random float32 model of a version."""
    with torch.random.fork_rng():
        torch.manual_seed(version)
        model = AutoModelForCausalLM.from_config(hf_config())
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms too, so that a mistake with them shows
                torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()


def bundle(version: int) -> WeightBundle:
    return pack_weights(make_model(version).named_parameters())


def save(folder: Path, *, eos: int | None = None) -> Path:
    """The model's folder without weights. Without `eos` nothing but its limits ends a response."""
    hf_config(eos=eos).save_pretrained(folder)
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2, " ": 3}
    vocab |= {letter: 4 + i for i, letter in enumerate(LETTERS)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return folder


def text(token_ids: np.ndarray) -> str:
    """As the saved tokenizer writes it."""
    special = ["<s>", "</s>", "<pad>", " "]
    return "".join((special + LETTERS)[token] for token in token_ids.tolist())


def request(request_id: str, prompt: Sequence[int], **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        sampling=SamplingParams(**({"max_tokens": 12} | sampling)),
    )
