"""The engine's core, without threads: add, abort, step, update the weights.

One step feeds every running request its newest token and a bounded number of prompt tokens of
others, samples, and returns what ended. Invariant: row i of the rectangle holds the keys and values
of `scheduler.running[i]`, for all of its tokens but the newest.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from freewheel.config.sections import Config
from freewheel.engine.admission import check_request
from freewheel.engine.decoder import ChunkInput, DecodeInput
from freewheel.engine.kv import KVRows, cell_bytes
from freewheel.engine.loading import LoadedModel, load_model
from freewheel.engine.request import FinishReason, Request
from freewheel.engine.sampling import Sampled, sample
from freewheel.engine.scheduler import Chunk, Limits, Plan, Scheduler
from freewheel.engine.stopping import Stopper
from freewheel.errors import ConfigError, InvariantError
from freewheel.types import Generation, GenerationRequest, ReplicaStats
from freewheel.weights import WeightBundle, unpack_weights

NO_WEIGHTS = -1
"""Version before the first update."""

_MAX_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
"""Prompt tokens in one step: bounds how long running requests wait for their next token."""
_SETTLED_PER_STEP = 1 << 24
"""Numbers of the weights that are packed with a step: some 25 ms; SmolLM2 takes nine steps."""

_SLACK_COLUMNS = 32
"""Least growth, where memory allows, of a rectangle that is laid out anew."""
_SLACK_ROWS = 8


class TorchEngine:
    """Continuous batching over one model.

    Args:
        config: `rollout` gives lengths, limits, device and number format.
        model: the model without weights, as `load_model` returns it.
        max_prefill_tokens: prompt tokens in one step; unset: by device.

    Raises:
        ConfigError: the longest request would not fit into `rollout.kv_cache_bytes`.
    """

    def __init__(
        self, config: Config, model: LoadedModel, *, max_prefill_tokens: int | None = None
    ) -> None:
        self._rollout = config.rollout
        self._model = model
        self._decoder = model.decoder
        self._stopper = Stopper(model.eos_token_ids, model.load_tokenizer)
        if config.rollout.stop and self._stopper.can_detect_strings:
            self._stopper.prepare()
        device = self._decoder.device
        self._scheduler = Scheduler(
            limits=self._limits(max_prefill_tokens or _MAX_PREFILL_TOKENS[device.type])
        )
        self._rows = KVRows(self._decoder.layers, dtype=self._decoder.dtype, device=device)
        self._version = NO_WEIGHTS
        self._num_generated_tokens = 0
        self._num_prompt_tokens = 0
        self._num_preempted = 0
        self._num_steps = 0

    @classmethod
    def from_folder(cls, config: Config, model_path: Path) -> "TorchEngine":
        """An engine for the model in a folder; its weights come by `update_weights`."""
        return cls(config, load_model(config, model_path))

    @property
    def version(self) -> int:
        """Policy version that samples now."""
        return self._version

    @property
    def can_step(self) -> bool:
        """Whether a step would compute anything."""
        return self._version != NO_WEIGHTS and self._scheduler.has_work

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has nothing to do."""
        return self._decoder.is_settled

    @property
    def has_prefills(self) -> bool:
        """Whether any request has yet to get its first token, or its keys and values anew."""
        return bool(self._scheduler.waiting or self._scheduler.prefilling)

    def stats(self) -> ReplicaStats:
        """Counters since the start."""
        return ReplicaStats(
            version=self._version,
            num_running=self._scheduler.num_active,
            num_waiting=len(self._scheduler.waiting),
            num_generated_tokens=self._num_generated_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            extra={
                "num_steps": float(self._num_steps),
                "num_preempted": float(self._num_preempted),
                "kv_cells": float(self._rows.num_cells),
            },
        )

    def check(self, request: GenerationRequest) -> None:
        """Refuse what the engine could not run, before it is taken in.

        Raises:
            RolloutError: class `over_long_prompt`, or `bad_prompt`.
            ConfigError: its sampling parameters cannot be used.
        """
        check_request(
            request,
            self._rollout,
            vocab_size=self._decoder.vocab_size,
            can_detect_strings=self._stopper.can_detect_strings,
        )

    def lacks_tokenizer(self, requests: Iterable[GenerationRequest]) -> bool:
        """Whether `load_tokenizer` is due before these requests, that `check` passed."""
        return not self._stopper.is_ready and any(request.sampling.stop for request in requests)

    def load_tokenizer(self) -> None:
        """Get ready for stop strings. Any thread may call.

        Raises:
            ConfigError: the tokenizer cannot be loaded.
        """
        self._stopper.prepare()

    def add(self, request: GenerationRequest) -> None:
        """Take a request in that `check` passed. Its id must not be in the engine."""
        if self._scheduler.find(request.request_id) is not None:
            raise InvariantError(f"request {request.request_id} is in the engine already")
        if self.lacks_tokenizer([request]):
            self.load_tokenizer()
        self._scheduler.add(Request.of(request))

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str], reason: FinishReason = "abort") -> list[Generation]:
        """End requests; each is returned with its tokens so far. Unknown ids are ignored."""
        results: list[Generation] = []
        for request_id in request_ids:
            request = self._scheduler.find(request_id)
            if request is None:
                continue
            if request in self._scheduler.running:
                self._drop_row(request)
            else:
                self._scheduler.drop(request)
            results.append(request.result(reason))
        return results

    @torch.inference_mode()
    def update_weights(self, version: int, bundle: WeightBundle) -> None:
        """Sample under new weights from the next token on; requests in flight go on.

        Their keys and values are computed anew, so that later logprobs are those of a forward pass
        of the new weights over the whole sequence. What makes the new weights faster is done piece
        by piece with the next steps (`settle`); until then they must not change where they lie.

        Raises:
            InvariantError: the bundle does not fit the model; the old weights stay.
        """
        self._model.weight_names.check({spec.name: spec.shape for spec in bundle.specs})
        self._decoder.load_weights(unpack_weights(bundle))
        self._scheduler.reset()
        self._version = version

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Compute one step; returns the requests that ended with it."""
        if not self.can_step:
            return []
        self.settle()
        self._give_way()
        plan = self._scheduler.plan()
        logits_NV = self._forward(plan)
        self._num_steps += 1
        return self._sample(plan, logits_NV)

    @torch.inference_mode()
    def settle(self) -> None:
        """Do a part of what an update of the weights left for later, if anything is left."""
        if not self._decoder.is_settled:
            self._decoder.settle(_SETTLED_PER_STEP)

    def _limits(self, max_prefill_tokens: int) -> Limits:
        rollout = self._rollout
        max_length = rollout.max_prompt_length + rollout.max_response_length
        bytes_per_token = cell_bytes(self._decoder.layers, self._decoder.dtype)
        max_cells = rollout.kv_cache_bytes // bytes_per_token
        if max_cells < 2 * max_length:
            raise ConfigError(
                f"rollout.kv_cache_bytes: {rollout.kv_cache_bytes} cannot hold one request of "
                f"{max_length} tokens; at least {2 * max_length * bytes_per_token}"
            )
        return Limits(
            max_num_seqs=rollout.max_num_seqs,
            max_cells=max_cells,
            max_prefill_tokens=max_prefill_tokens,
            max_length=max_length,
        )

    def _give_way(self) -> None:
        """Take rows back, youngest first, until the others have room for their next token."""
        victims = self._scheduler.crowded_rows()
        for victim in victims:
            self._drop_row(victim)
        self._num_preempted += len(victims)
        self._scheduler.requeue(victims)

    def _forward(self, plan: Plan) -> torch.Tensor:
        lengths = [request.length for request in plan.decode]
        self._trim()
        if lengths:
            self._make_room(
                num_rows=len(lengths),
                end=self._rows.end + 1,
                longest=max(lengths) - 1,
                needed=max(lengths),
            )
        decode = DecodeInput(
            token_ids=[request.last_token for request in plan.decode],
            lengths=lengths,
            rows=self._rows,
        )
        logits_NV = self._decoder.forward(decode, [self._chunk_input(c) for c in plan.chunks])
        if lengths:
            self._rows.end += 1
        for chunk in plan.chunks:
            chunk.prefill.done = chunk.stop
            self._num_prompt_tokens += chunk.stop - chunk.start
        return logits_NV

    def _chunk_input(self, chunk: Chunk) -> ChunkInput:
        prefill = chunk.prefill
        if prefill.kv is None:
            prefill.kv = KVRows(
                self._decoder.layers,
                dtype=self._decoder.dtype,
                device=self._decoder.device,
                num_rows=1,
                num_columns=len(prefill.token_ids),
            )
        return ChunkInput(
            token_ids=prefill.token_ids[chunk.start : chunk.stop],
            start=chunk.start,
            kv=prefill.kv,
            is_last=chunk.is_last,
        )

    def _sample(self, plan: Plan, logits_NV: torch.Tensor) -> list[Generation]:
        """Give each request whose logits there are its next token; end and start rows."""
        requests, sources = list(plan.decode), list(range(len(plan.decode)))
        done = [chunk.prefill for chunk in plan.chunks if chunk.is_last]
        for offset, prefill in enumerate(done):
            requests += prefill.members
            sources += [len(plan.decode) + offset] * len(prefill.members)
        if not requests:
            return []
        if len(sources) != len(logits_NV):
            logits_NV = logits_NV[torch.tensor(sources, device=logits_NV.device)]
        ended = self._append(requests, sample(logits_NV, requests))
        for request in plan.decode if ended else ():
            if request in ended:
                self._drop_row(request)
        for prefill in done:
            assert prefill.kv is not None
            prefill.kv.end = len(prefill.token_ids)
            self._join([m for m in prefill.members if m not in ended], prefill.kv)
            self._scheduler.prefilling.remove(prefill)
        return [request.result(reason) for request, reason in ended.items()]

    def _append(self, requests: Sequence[Request], sampled: Sampled) -> dict[Request, FinishReason]:
        """Record the sampled tokens; returns the requests that ended, and why."""
        ended: dict[Request, FinishReason] = {}
        for request, token_id, logprob in zip(
            requests, sampled.token_ids, sampled.logprobs, strict=True
        ):
            if logprob != logprob:  # NaN: the model's logits are not finite
                ended[request] = "error"
                continue
            request.append(token_id, logprob, self._version)
            reason = self._stopper.finish_reason(request)
            if reason is not None:
                ended[request] = reason
        self._num_generated_tokens += len(requests)
        return ended

    def _join(self, members: Sequence[Request], kv: KVRows) -> None:
        """Make rows of requests whose prompt has been prefilled."""
        if not members:
            return
        running = self._scheduler.running
        longest = self._longest_row()
        self._make_room(
            num_rows=len(running) + len(members),
            end=max(self._rows.end, kv.end),
            longest=longest,
            needed=max(longest, kv.end),
        )
        if kv.end > self._rows.end:
            self._rows.shift(len(running), longest, kv.end)
        self._rows.join(kv, len(running), len(members))
        running.extend(members)

    def _make_room(self, *, num_rows: int, end: int, longest: int, needed: int) -> None:
        """Lay the rectangle out anew unless it reaches as far as it will be used.

        Args:
            num_rows: rows that will be in use.
            end: column at which they would end if nothing moves.
            longest: tokens of the longest row in it now.
            needed: tokens of the longest row that will be in it.
        """
        rows, limits = self._rows, self._scheduler.limits
        if num_rows <= rows.num_rows and end <= rows.num_columns:
            return
        cells = limits.max_cells - self._prefill_cells()
        spare_rows = min(-(-num_rows // _SLACK_ROWS) * _SLACK_ROWS, limits.max_num_seqs)
        new_rows = max(num_rows, min(spare_rows, cells // needed))
        wanted = min(needed + max(_SLACK_COLUMNS, needed // 4), limits.max_length)
        rows.fit(
            num_used=len(self._scheduler.running),
            longest=longest,
            num_rows=new_rows,
            num_columns=max(needed, min(wanted, cells // new_rows)),
        )

    def _trim(self) -> None:
        """Give back what the rectangle has to spare if the prefills need it."""
        if self._rows.num_cells + self._prefill_cells() <= self._scheduler.limits.max_cells:
            return
        count, longest = len(self._scheduler.running), self._longest_row()
        self._rows.fit(
            num_used=count, longest=longest, num_rows=count, num_columns=longest + (count > 0)
        )

    def _longest_row(self) -> int:
        """Tokens of the longest row: all of its request's but the newest."""
        return max((request.length - 1 for request in self._scheduler.running), default=0)

    def _prefill_cells(self) -> int:
        return sum(len(prefill.token_ids) for prefill in self._scheduler.prefilling)

    def _drop_row(self, request: Request) -> None:
        """Take a running request out; the last row moves into its place."""
        running = self._scheduler.running
        row, last = running.index(request), len(running) - 1
        if row != last:
            running[row] = running[last]
            self._rows.move(last, row, running[row].length - 1)
        running.pop()
