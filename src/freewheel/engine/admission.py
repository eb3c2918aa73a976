"""What an engine refuses before it takes a request in: the same for every engine."""

from freewheel.config.sections import RolloutConfig
from freewheel.errors import ConfigError, FailureClass, RolloutError
from freewheel.sampling_limits import sampling_problem
from freewheel.types import GenerationRequest


def check_request(
    request: GenerationRequest,
    rollout: RolloutConfig,
    *,
    vocab_size: int,
    can_detect_strings: bool,
) -> None:
    """Refuse what the engine could not run.

    Args:
        request: to be judged.
        rollout: gives the lengths.
        vocab_size: rows of the embedding.
        can_detect_strings: whether there is a tokenizer to see stop strings with.

    Raises:
        RolloutError: class `over_long_prompt`, or `bad_prompt`.
        ConfigError: its sampling parameters cannot be used.
    """
    name, sampling, ids = (
        f"request {request.request_id}",
        request.sampling,
        request.prompt_token_ids,
    )
    problem = sampling_problem(sampling)
    if problem is not None:
        raise ConfigError(f"{name}: sampling parameters cannot be used: {problem}")
    # Only the whole counts: a later turn's prompt has the turns before it. The length of the
    # conversation's own prompt is checked where it is rendered.
    longest = rollout.max_prompt_length + rollout.max_response_length
    if len(ids) + sampling.max_tokens > longest:
        raise RolloutError(
            FailureClass.OVER_LONG_PROMPT,
            f"{name}: {len(ids)} prompt tokens and max_tokens {sampling.max_tokens}, at most "
            f"{longest} together (rollout.max_prompt_length + rollout.max_response_length)",
        )
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise RolloutError(
            FailureClass.BAD_PROMPT,
            f"{name}: the prompt is empty or has token ids outside of [0, {vocab_size})",
        )
    if sampling.stop and not can_detect_strings:
        raise ConfigError(f"{name}: stop strings need a tokenizer in model.path")
