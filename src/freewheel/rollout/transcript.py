"""The token record of one rollout as it grows: prompt, sampled turns, what the environment adds.

Plain state, no waiting. The response is everything after the prompt; it never exceeds the limit,
environment tokens included.
"""

import numpy as np
import numpy.typing as npt

from freewheel.types import Generation, Trajectory, VersionSpans

Tokens = npt.NDArray[np.int32]


class Transcript:
    """Tokens of one rollout.

    Args:
        max_response_tokens: most tokens after the prompt.
    """

    def __init__(self, *, max_response_tokens: int) -> None:
        self._max_response_tokens = max_response_tokens
        self._prompt: Tokens | None = None
        self._parts: list[Generation | Tokens] = []
        self._untrained: set[int] = set()
        self._num_response_tokens = 0
        self._finish_reason = ""

    @property
    def has_prompt(self) -> bool:
        """Whether the prompt is set."""
        return self._prompt is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return 0 if self._prompt is None else len(self._prompt)

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt: sampled ones and the environment's."""
        return self._num_response_tokens

    @property
    def num_tokens_left(self) -> int:
        """Tokens that the response may still take."""
        return self._max_response_tokens - self._num_response_tokens

    @property
    def finish_reason(self) -> str:
        """Why the last turn ended."""
        return self._finish_reason

    @property
    def last_token_id(self) -> int:
        """Last token there is; -1 before the prompt."""
        token_ids = self.token_ids()
        return int(token_ids[-1]) if len(token_ids) else -1

    def token_ids(self) -> Tokens:
        """Everything so far, int32 (T,)."""
        prompt = np.zeros(0, dtype=np.int32) if self._prompt is None else self._prompt
        return np.concatenate([prompt, *map(_tokens, self._parts)])

    def set_prompt(self, token_ids: Tokens) -> None:
        """Set the prompt, once, before anything else."""
        if self._prompt is not None:
            raise ValueError("the prompt is set already")
        self._prompt = token_ids

    @property
    def has_trained_tokens(self) -> bool:
        """Whether any token is one to train on."""
        return any(
            isinstance(part, Generation) and len(part.token_ids) and number not in self._untrained
            for number, part in enumerate(self._parts)
        )

    def add_sampled(self, generation: Generation, *, is_trained: bool = True) -> None:
        """Append a turn that the policy sampled.

        Args:
            generation: the turn.
            is_trained: false if it was sampled from another distribution than the trainer's: its
                logprobs could not be compared, so that its tokens stay out of the loss.
        """
        if not is_trained:
            self._untrained.add(len(self._parts))
        self._parts.append(generation)
        self._num_response_tokens += len(generation.token_ids)
        self._finish_reason = generation.finish_reason

    def add_environment(self, token_ids: Tokens) -> bool:
        """Append tokens that the policy did not sample, unless they would exceed the limit.

        Returns:
            False, and the finish reason becomes `length`, if they would leave no room for a turn.
        """
        if len(token_ids) >= self.num_tokens_left:
            self._finish_reason = "length"
            return False
        self._parts.append(token_ids)
        self._num_response_tokens += len(token_ids)
        return True

    def version_spans(self) -> VersionSpans:
        """Run lengths of the policy versions over the sampled tokens, in order of sampling."""
        sampled = [part.versions for part in self._parts if isinstance(part, Generation)]
        versions = np.concatenate([np.zeros(0, dtype=np.int32), *sampled])
        if not len(versions):
            return ()
        starts = np.concatenate([[0], np.flatnonzero(np.diff(versions)) + 1])
        lengths = np.diff(np.concatenate([starts, [len(versions)]]))
        return tuple(
            (int(versions[start]), int(length))
            for start, length in zip(starts, lengths, strict=True)
        )

    def trajectory(self, *, sample_id: str, group_id: int, reward: float) -> Trajectory:
        """The whole record."""
        prompt = np.zeros(0, dtype=np.int32) if self._prompt is None else self._prompt
        parts = [
            _as_environment(prompt),
            *(
                _as_environment(_tokens(part)) if number in self._untrained else _columns(part)
                for number, part in enumerate(self._parts)
            ),
        ]
        mask, logprobs, versions = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Trajectory(
            sample_id=sample_id,
            group_id=group_id,
            reward=reward,
            token_ids=self.token_ids(),
            loss_mask=mask.astype(np.bool_),
            rollout_logprobs=logprobs.astype(np.float32),
            versions=versions.astype(np.int32),
        )


def _tokens(part: Generation | Tokens) -> Tokens:
    return part.token_ids if isinstance(part, Generation) else part


def _columns(
    part: Generation | Tokens,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """(loss mask, logprobs, versions) of a part."""
    if isinstance(part, Generation):
        return np.ones(len(part.token_ids), dtype=np.bool_), part.logprobs, part.versions
    return _as_environment(part)


def _as_environment(
    token_ids: Tokens,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    length = len(token_ids)
    return (
        np.zeros(length, dtype=np.bool_),
        np.zeros(length, dtype=np.float32),
        np.full(length, -1, dtype=np.int32),
    )
