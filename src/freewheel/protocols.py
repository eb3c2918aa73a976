"""The seams: what the control plane asks of workers, and nothing else of them.

Each Protocol has a real backend (Ray processes) and a fake (virtual time). Every method that
reaches another process may raise the matching `LostError`; the caller sets the deadline.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from freewheel.types import (
    DatasetInfo,
    Generation,
    GenerationRequest,
    GroupRequest,
    GroupResult,
    LoopReport,
    PromptInfo,
    Ref,
    ReplicaStats,
    Split,
    TrainerInfo,
    TrainRequest,
    TrainResult,
    Weights,
)


class Watched(Protocol):
    """A worker process whose event loops are watched from inside."""

    async def watch(self, after: int, wait_s: float) -> list[LoopReport]:
        """Reports of blocked loops with a higher number than `after`, oldest first.

        Waits at most `wait_s` for the first one. Answers while the process's serving loop is
        blocked; no answer means that nothing in the process can run.
        """
        ...


class Replica(Watched, Protocol):
    """One copy of an inference engine in a process of its own."""

    @property
    def replica_id(self) -> int:
        """Number of the replica, kept when its process is replaced."""
        ...

    @property
    def waiting_for(self) -> str:
        """What a start that is under way waits for; empty if it waits for nothing."""
        ...

    async def start(self) -> None:
        """Bring the engine up, without weights to serve yet.

        Raises:
            StartupError: the process could not be placed or the engine could not be built.
        """
        ...

    async def update_weights(self, weights: Weights) -> None:
        """Fetch a version and activate it between two tokens; requests in flight go on.

        Returns when every token from now on is sampled under `weights.version`.

        Raises:
            WeightsLostError: the version is nowhere any more; the replica is as it was.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End what a `GroupRequest` has in the engine, whose rollout worker is gone.

        Returns when it has ended; what still arrives of it is refused. Unknown ids are ignored.
        """
        ...

    async def stats(self) -> ReplicaStats:
        """Counters of the engine."""
        ...

    def kill(self) -> None:
        """End the process at once. Idempotent; never waits."""
        ...


class Generator(Protocol):
    """What a rollout worker sees of a replica."""

    async def generate(
        self, requests: Sequence[GenerationRequest], *, timeout_s: float
    ) -> list[Generation]:
        """Sample a response for each request, in order; at the limit what there is comes back.

        Raises:
            RolloutError: the engine refused a request (class `over_long_prompt`) or failed.
            ReplicaLostError: the replica's process is gone.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; each comes back with what it has. Unknown ids are ignored."""
        ...


class RolloutWorker(Watched, Protocol):
    """A process in which user code runs: data, environments, rewards."""

    @property
    def worker_id(self) -> int:
        """Number of the worker, kept when its process is replaced."""
        ...

    @property
    def waiting_for(self) -> str:
        """What a start that is under way waits for; empty if it waits for nothing."""
        ...

    async def start(self) -> dict[Split, DatasetInfo]:
        """Open the splits that the configuration names and import the user's code.

        Raises:
            StartupError: the process could not be placed.
            DataError: the data cannot be read.
            ConfigError: the user's code cannot be imported.
        """
        ...

    async def prepare(self, split: Split, indices: Sequence[int]) -> list[PromptInfo]:
        """Render and tokenize prompts; says which cannot be used, and why."""
        ...

    async def run_group(self, request: GroupRequest, replica: Replica) -> GroupResult:
        """Run the members of a request; each ends as a finished or as a failed outcome.

        Cancelling the call cancels the group in the worker and its requests in the engine.

        Raises:
            RolloutWorkerLostError: the worker's process is gone.
            ReplicaLostError: the replica was gone before the request could be sent.
        """
        ...

    def kill(self) -> None:
        """End the process at once. Idempotent; never waits."""
        ...


class Trainer(Protocol):
    """The training side: one process or several ranks that act as one."""

    @property
    def processes(self) -> Sequence[Watched]:
        """Its processes, by rank."""
        ...

    @property
    def waiting_for(self) -> str:
        """What a start that is under way waits for; empty if it waits for nothing."""
        ...

    async def start(self, checkpoint: Path | None) -> TrainerInfo:
        """Build model and optimizer, from a checkpoint's folder if one is given.

        Raises:
            StartupError: the process could not be placed.
            CheckpointError: the checkpoint cannot be read.
        """
        ...

    async def train_step(self, request: TrainRequest) -> TrainResult:
        """Train on whole groups. The same requests in the same order give the same weights.

        Raises:
            TrainingDivergedError: loss or gradient is not finite.
            TrajectoriesLostError: some payloads are gone; nothing was trained.
        """
        ...

    async def publish(self, version: int) -> Weights:
        """Copy the current weights to where replicas can fetch them."""
        ...

    async def publish_restored(self, version: int) -> Weights:
        """Publish again a version that a checkpoint carries beside the trainer's own weights.

        Needed when a checkpoint was taken between two publications: rollouts go on under the
        version they had, not under the trainer's newer weights; and for a validation that was
        under way.

        Raises:
            CheckpointError: the checkpoint does not carry that version.
        """
        ...

    async def copy_state(self, step: int) -> None:
        """Copy model, optimizer, schedule and RNG in memory, to be written later."""
        ...

    async def write_state(
        self, step: int, folder: Path, trajectories: Sequence[Ref], held: Sequence[Weights]
    ) -> None:
        """Write the copy taken at `step`, and these trajectories, into an existing folder.

        `held` are the published versions that a resumed run needs beside the trainer's weights.
        Runs beside `train_step`. Frees the copy, also when it fails.

        Raises:
            TrajectoriesLostError: some are gone; nothing was written, and the copy is kept.
            WeightsLostError: some of `held` are gone; the same.
        """
        ...

    def load_trajectories(self, folder: Path, group_ids: Sequence[int]) -> list[Ref]:
        """References to the trajectories of these groups, read from a checkpoint's folder.

        Returns at once.

        Raises:
            TrainerLostError: the trainer is not started, or gone.
        """
        ...

    def kill(self) -> None:
        """End the processes at once. Idempotent; never waits."""
        ...


class Backend(Protocol):
    """Places and starts worker processes. Making a proxy is instant; its `start` does the work."""

    async def start(self) -> None:
        """Connect to, or start, the distributed engine. Called before anything else."""
        ...

    def replica(self, replica_id: int) -> Replica:
        """A new replica process under this number."""
        ...

    def rollout_worker(self, worker_id: int) -> RolloutWorker:
        """A new rollout worker process under this number."""
        ...

    def trainer(self) -> Trainer:
        """A new trainer."""
        ...

    async def aclose(self) -> None:
        """End every process that this backend started."""
        ...


class Recorder(Protocol):
    """Where a run's records go. Calls return at once; writing happens elsewhere."""

    def event(self, name: str, **fields: Any) -> None:
        """Append to `events.jsonl`."""
        ...

    def metrics(self, row: dict[str, Any]) -> None:
        """Append to `metrics.jsonl`, one row a training step."""
        ...

    def validation(self, row: dict[str, Any]) -> None:
        """Append to `validations.jsonl`."""
        ...

    def sample(self, row: dict[str, Any]) -> None:
        """Append to `samples.jsonl`, when the fate of a sample is known."""
        ...

    def num_rows(self) -> dict[str, int]:
        """Rows recorded so far, by file name without suffix; the checkpoint keeps them."""
        ...

    async def flush(self) -> None:
        """Return when everything recorded so far is on disk."""
        ...


class CheckpointStore(Protocol):
    """Folders of checkpoints: written aside, verified, renamed; `latest` moves last."""

    async def begin(self, step: int) -> Path:
        """Make the temporary folder of a checkpoint."""
        ...

    async def commit(self, step: int, control: dict[str, Any]) -> Path:
        """Write the control state, verify, rename, move `latest`, drop what is beyond keep-N.

        Raises:
            CheckpointError: with the path and the reason; the previous checkpoints are untouched.
        """
        ...
