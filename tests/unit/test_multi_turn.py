"""Environments of several turns over the real engine, without processes between them."""

import json

import numpy as np
import pytest

from freewheel.config.sections import Config, DataConfig, RolloutConfig
from freewheel.engine import AsyncEngine
from freewheel.rollout import Episode
from freewheel.rollout.worker import RolloutWorkerCore
from freewheel.types import SamplingParams
from tests.unit.engine_models import bundle, make_model, model_logprobs, save
from tests.unit.rollout_fakes import group_request

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 8, 60
TURN_TOKENS = 6
ADDED = "AND"


class ThreeTurns:
    """Adds a text before the second and third turn."""

    async def run(self, episode: Episode) -> float:
        await episode.generate(max_tokens=TURN_TOKENS)
        await episode.generate(ADDED, max_tokens=TURN_TOKENS)
        await episode.generate(ADDED, max_tokens=TURN_TOKENS)
        return 1.0


class AsLongAsItGoes:
    """Talks until there is no room for another turn."""

    async def run(self, episode: Episode) -> float:
        num_turns = 0
        turn = await episode.generate(max_tokens=TURN_TOKENS)
        while turn.token_ids:
            num_turns += 1
            turn = await episode.generate(ADDED, max_tokens=TURN_TOKENS)
        return float(num_turns)


async def _play(tmp_path, environment: str):
    """Two rollouts of a prompt by a rollout worker on the real engine; the model's folder."""
    folder = save("llama_tied", tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "WHATNOW", "ground_truth": ""}) + "\n")
    config = Config(
        data=DataConfig(train_files=str(rows)),
        rollout=RolloutConfig(
            environment=f"{__name__}:{environment}",
            reward="exact_match",
            max_prompt_length=MAX_PROMPT_TOKENS,
            max_response_length=MAX_RESPONSE_TOKENS,
            kv_cache_bytes=1 << 24,
            device="cpu",
        ),
    )
    engine, worker = AsyncEngine(config, folder), RolloutWorkerCore(config, folder, 0)
    await engine.start()
    await worker.start()
    try:
        await engine.update_weights(0, bundle(make_model("llama_tied")))
        return await worker.run_group(group_request(2, max_tokens=MAX_RESPONSE_TOKENS), engine)
    finally:
        await worker.close()
        await engine.aclose()


async def test_later_turns_continue_a_transcript_longer_than_any_prompt(tmp_path):
    outcomes, trajectories = await _play(tmp_path, "ThreeTurns")
    assert [(o.failure, o.message) for o in outcomes] == [(None, "")] * 2
    assert {o.num_prompt_tokens for o in outcomes} == {7}
    for trajectory in trajectories:
        # The last turn's request held 7 + 2 * (6 + 3) tokens unless a turn ended by itself.
        assert len(trajectory.token_ids) > MAX_PROMPT_TOKENS + TURN_TOKENS
        prompt, rest = trajectory.token_ids[:7].tolist(), trajectory.token_ids[7:]
        sampling = SamplingParams(max_tokens=1, temperature=0.7)
        expected = model_logprobs(make_model("llama_tied"), prompt, rest, sampling)
        mask = trajectory.loss_mask[7:]
        assert mask.sum() < len(mask)
        np.testing.assert_allclose(trajectory.rollout_logprobs[7:][mask], expected[mask], atol=1e-4)


async def test_turns_go_on_until_the_response_is_full(tmp_path):
    outcomes, trajectories = await _play(tmp_path, "AsLongAsItGoes")
    assert [(o.failure, o.message) for o in outcomes] == [(None, "")] * 2
    for outcome, trajectory in zip(outcomes, trajectories, strict=True):
        room_for_nothing = MAX_RESPONSE_TOKENS - len(ADDED)
        assert room_for_nothing <= outcome.num_response_tokens <= MAX_RESPONSE_TOKENS
        assert len(trajectory.token_ids) == outcome.num_prompt_tokens + outcome.num_response_tokens
