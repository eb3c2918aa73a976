"""When a request has ended: end tokens, stop strings, its limit of tokens."""

from collections.abc import Callable

from freewheel.engine.decoder import HFObject
from freewheel.engine.request import FinishReason, Request
from freewheel.errors import ConfigError

_SPARE_TOKENS = 8
"""Decoded before the window in which a stop string may lie: at its edge tokenizers drop a leading
space, or show half a character."""


class Stopper:
    """Says after each token whether its request has ended.

    Args:
        eos_token_ids: end every request.
        load_tokenizer: called by `prepare`; None: there is no tokenizer.
    """

    def __init__(
        self, eos_token_ids: frozenset[int], load_tokenizer: Callable[[], HFObject] | None
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._load_tokenizer = load_tokenizer
        self._tokenizer: HFObject | None = None

    @property
    def can_detect_strings(self) -> bool:
        """Whether there is a tokenizer to see text with."""
        return self._load_tokenizer is not None

    @property
    def is_ready(self) -> bool:
        """Whether stop strings can be looked for at once."""
        return self._tokenizer is not None

    def prepare(self) -> None:
        """Get ready for stop strings, once: takes a second where transformers is not loaded yet.

        Raises:
            ConfigError: the tokenizer cannot be loaded.
        """
        if self._tokenizer is not None:
            return
        assert self._load_tokenizer is not None
        try:
            self._tokenizer = self._load_tokenizer()
        except Exception as error:
            raise ConfigError(
                f"stop strings need the tokenizer in model.path, which cannot be loaded: {error}"
            ) from error

    def finish_reason(self, request: Request) -> FinishReason | None:
        """Why the request ends with its newest token; None if it goes on."""
        token_id, sampling = request.last_token, request.sampling
        if token_id in self._eos_token_ids or token_id in sampling.stop_token_ids:
            return "stop"
        if sampling.stop and self._completes_stop(request):
            return "stop"
        if len(request.token_ids) >= sampling.max_tokens:
            return "length"
        return None

    def _completes_stop(self, request: Request) -> bool:
        """Whether a stop string stands in the last tokens' text.

        A string that ends with the newest token spans at most as many tokens as it has bytes, so
        that decoding a window of constant size is enough.
        """
        assert self._tokenizer is not None
        stops = request.sampling.stop
        window = max(len(stop.encode()) for stop in stops) + _SPARE_TOKENS
        text: str = self._tokenizer.decode(
            request.token_ids[-window:],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return any(stop in text for stop in stops)
