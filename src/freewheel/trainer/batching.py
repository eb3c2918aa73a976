"""From trajectories to micro-batches: which sequences go through the model together, and as what.

A *sample* is a trajectory with its advantage. A micro-batch is a packed row of samples within a
token budget, longest first, so that sequences of equal length lie side by side. Samples without
gradient (advantage exactly zero, no entropy bonus) only go forward, for the metrics. The plan
depends on nothing but its arguments: every rank makes the whole plan and takes its share.

Shapes: T tokens of a trajectory or of a row, N sampled tokens, S samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from freewheel.trainer.attention import Packing
from freewheel.trainer.losses import LossAggMode, group_advantages, sequence_weights
from freewheel.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory, ready for the model.

    Attributes:
        index: its place in the mini-batch.
        sample_id: the trajectory's.
        input_ids: int64 (T,), up to the last token that predicts a sampled one.
        rows: int64 (N,), where in `input_ids` the hidden state lies that predicts each target.
        targets: int64 (N,), the sampled tokens.
        rollout_logprobs: float32 (N,).
        versions: int64 (N,), policy version that sampled each target.
        advantage: relative to its group.
        weight: of each of its tokens in the loss (see `sequence_weights`).
    """

    index: int
    sample_id: str
    input_ids: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    rollout_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    advantage: float
    weight: float

    @property
    def num_input_tokens(self) -> int:
        """Tokens that go through the model."""
        return int(self.input_ids.size)

    @property
    def num_targets(self) -> int:
        """Sampled tokens."""
        return int(self.targets.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A packed row on the device. Sampled tokens of all its samples are flat, in the row's order.

    Attributes:
        lengths: input tokens of each sample in the row; packing says the same in runs.
        input_ids: int64 (1, T). position_ids: int64 (1, T), from 0 in each sample.
        rows_N: int64, place in the row of the hidden state that predicts each target.
        targets_N: int64. rollout_logprobs_N, advantages_N: float32.
        versions_N: int64, policy version that sampled each target.
        weights_N: float32, weight of each token in the loss.
        per_sequence_N: float32, 1 / sampled tokens of its sample.
        samples_N: int64, `Sample.index` of each token.
        with_grad: false if it only goes forward.
        counts: false for a stand-in that a rank needs to keep step with the others; its weights are
            zero and it is left out of the metrics.
    """

    lengths: tuple[int, ...]
    packing: Packing
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rows_N: torch.Tensor
    targets_N: torch.Tensor
    rollout_logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    per_sequence_N: torch.Tensor
    samples_N: torch.Tensor
    with_grad: bool
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """One optimizer step: its samples (all ranks'), and this rank's micro-batches."""

    samples: tuple[Sample, ...]
    micro_batches: tuple[MicroBatch, ...]

    @property
    def num_targets(self) -> int:
        """Sampled tokens of all ranks."""
        return sum(sample.num_targets for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What a plan depends on, besides the samples."""

    max_tokens: int
    rank: int = 0
    world_size: int = 1
    all_with_grad: bool = False


def split_groups(
    groups: Sequence[list[Trajectory]], mini_batch_groups: int
) -> Iterator[Sequence[list[Trajectory]]]:
    """Groups of each mini-batch, in order; the last one may be smaller."""
    for start in range(0, len(groups), mini_batch_groups):
        yield groups[start : start + mini_batch_groups]


def make_samples(
    groups: Sequence[list[Trajectory]], *, normalize_by_std: bool, loss_agg_mode: LossAggMode
) -> tuple[Sample, ...]:
    """Samples of one mini-batch, with advantages over whole groups and weights over all of them."""
    flat = [trajectory for group in groups for trajectory in group]
    advantages = [
        advantage
        for group in groups
        for advantage in group_advantages(
            [trajectory.reward for trajectory in group], normalize_by_std=normalize_by_std
        )
    ]
    num_targets = [int(trajectory.loss_mask[1:].sum()) for trajectory in flat]
    weights = sequence_weights(num_targets, loss_agg_mode)
    return tuple(
        _sample(index, trajectory, float(advantages[index]), float(weights[index]))
        for index, trajectory in enumerate(flat)
    )


def _sample(index: int, trajectory: Trajectory, advantage: float, weight: float) -> Sample:
    # The first token has nothing before it that could predict it.
    sampled = np.flatnonzero(trajectory.loss_mask[1:]) + 1
    end = int(sampled[-1]) if sampled.size else 0
    tokens = trajectory.token_ids.astype(np.int64)
    return Sample(
        index=index,
        sample_id=trajectory.sample_id,
        input_ids=tokens[:end],
        rows=sampled - 1,
        targets=tokens[sampled],
        rollout_logprobs=trajectory.rollout_logprobs[sampled].astype(np.float32),
        versions=trajectory.versions[sampled].astype(np.int64),
        advantage=advantage,
        weight=weight,
    )


def plan_mini_batch(
    samples: tuple[Sample, ...], settings: PlanSettings, device: torch.device
) -> MiniBatch:
    """Spread the samples over ranks and micro-batches; all ranks have as many of each kind."""
    usable = [sample for sample in samples if sample.num_targets]
    kinds: dict[bool, list[Sample]] = {True: [], False: []}
    for sample in usable:
        kinds[settings.all_with_grad or sample.advantage != 0].append(sample)
    micro_batches = [
        pack(part, with_grad=with_grad, counts=counts, device=device)
        for with_grad, members in kinds.items()
        for part, counts in plan_rank(members, settings)
    ]
    return MiniBatch(samples=samples, micro_batches=tuple(micro_batches))


def plan_rank(samples: Sequence[Sample], settings: PlanSettings) -> list[tuple[list[Sample], bool]]:
    """This rank's micro-batches: samples, and whether they count or stand in with zero weight."""
    shares = balance(samples, settings.world_size)
    parts = [fill(share, settings.max_tokens) for share in shares]
    num_parts = max(len(part) for part in parts)
    mine = parts[settings.rank]
    while len(mine) < num_parts and max((len(part) for part in mine), default=0) > 1:
        largest = max(range(len(mine)), key=lambda place: len(mine[place]))
        half = len(mine[largest]) // 2
        mine[largest : largest + 1] = [mine[largest][:half], mine[largest][half:]]
    counted = [(part, True) for part in mine]
    if len(counted) < num_parts:
        shortest = min(samples, key=lambda sample: (sample.num_input_tokens, sample.index))
        counted += [([shortest], False)] * (num_parts - len(counted))
    return counted


def balance(samples: Sequence[Sample], world_size: int) -> list[list[Sample]]:
    """Samples of each rank, longest first: each goes to the rank with the fewest tokens so far."""
    shares: list[list[Sample]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for sample in sorted(samples, key=lambda sample: (-sample.num_input_tokens, sample.index)):
        rank = loads.index(min(loads))
        shares[rank].append(sample)
        loads[rank] += sample.num_input_tokens
    return shares


def fill(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Cut the samples, in order, into parts of at most `max_tokens` tokens or one sample."""
    parts: list[list[Sample]] = []
    room = 0
    for sample in samples:
        if not parts or sample.num_input_tokens > room:
            parts.append([])
            room = max_tokens
        parts[-1].append(sample)
        room -= sample.num_input_tokens
    return parts


def pack(
    samples: Sequence[Sample], *, with_grad: bool, counts: bool, device: torch.device
) -> MicroBatch:
    """The packed row of these samples, in their order."""
    lengths = [sample.num_input_tokens for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    num_targets = np.array([sample.num_targets for sample in samples])

    def flat(arrays: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)

    def spread(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        repeated = torch.from_numpy(np.repeat(np.asarray(values), num_targets))
        return repeated.to(device=device, dtype=dtype)

    return MicroBatch(
        lengths=tuple(lengths),
        packing=Packing.of(lengths),
        input_ids=flat([sample.input_ids for sample in samples])[None],
        position_ids=flat([np.arange(length) for length in lengths])[None],
        rows_N=flat([s.rows + start for s, start in zip(samples, starts, strict=True)]),
        targets_N=flat([sample.targets for sample in samples]),
        rollout_logprobs_N=flat([sample.rollout_logprobs for sample in samples]),
        versions_N=flat([sample.versions for sample in samples]),
        advantages_N=spread([sample.advantage for sample in samples]),
        weights_N=spread([sample.weight if counts else 0.0 for sample in samples]),
        per_sequence_N=spread([1.0 / sample.num_targets for sample in samples]),
        samples_N=spread([sample.index for sample in samples], torch.int64),
        with_grad=with_grad,
        counts=counts,
    )
