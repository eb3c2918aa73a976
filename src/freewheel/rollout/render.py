"""From prompts to tokens and from tokens to text, by the model's own tokenizer.

The renderer is synchronous and not thread-safe; the worker gives it one thread of its own.
"""

from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from freewheel.config.sections import Config
from freewheel.data.dataset import PromptDataset
from freewheel.data.records import Message, PromptRecord
from freewheel.errors import ConfigError, DataError, FailureClass, RolloutError
from freewheel.tokenizer import Tokenizer, load_tokenizer
from freewheel.types import PromptInfo
from freewheel.unicode_text import well_formed

Tokens = npt.NDArray[np.int32]

_MARK = "\u241efreewheel\u241e"
"""Stands for an assistant's turn in a template; no template or text contains it."""


class Renderer:
    """Renders prompts, what environments add between turns, and responses.

    Args:
        config: the configuration.
        model_path: folder with the tokenizer.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or has no chat template where one is asked for.
    """

    def __init__(self, config: Config, model_path: Path) -> None:
        self._tokenizer = _load_tokenizer(model_path, config.model.trust_remote_code)
        has_template = bool(self._tokenizer.chat_template)
        wanted = config.data.apply_chat_template
        if wanted and not has_template:
            raise ConfigError(
                f"data.apply_chat_template=true: the tokenizer in {model_path} has no chat template"
            )
        self._templated = has_template if wanted is None else wanted
        self._system_prompt = config.data.system_prompt
        self._max_prompt_length = config.rollout.max_prompt_length

    def prompt(self, prompt: str | list[Message]) -> Tokens:
        """Tokens of a prompt.

        Returns:
            int32 (T,).

        Raises:
            RolloutError: it cannot be rendered (`bad_prompt`) or is longer than
                `rollout.max_prompt_length` (`over_long_prompt`).
        """
        token_ids = self._prompt_ids(prompt)
        self._check_length(len(token_ids))
        return np.asarray(token_ids, dtype=np.int32)

    def continuation(self, added: str | list[Message], *, last_token_id: int) -> Tokens:
        """Tokens that follow the assistant's turn when the environment adds to the conversation.

        Args:
            added: text (one user message, when the chat template is applied), or messages.
            last_token_id: the turn's last token; the template's end of turn is not repeated if the
                turn ended with it.

        Returns:
            int32 (T,), the next turn's opening included.

        Raises:
            RolloutError: the messages cannot be rendered (class `environment`).
        """
        if not self._templated:
            if not isinstance(added, str):
                raise RolloutError(
                    FailureClass.ENVIRONMENT, "messages need a chat template, and none is applied"
                )
            return self.text(added)
        before: list[Message] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _MARK},
        ]
        try:
            whole = self._apply_template([*before, *_as_messages(added)])
        except RolloutError as error:
            raise RolloutError(FailureClass.ENVIRONMENT, str(error)) from error
        tail = whole.rpartition(_MARK)[2]
        return self.text(tail.removeprefix(self._token_text(last_token_id)))

    def text(self, text: str) -> Tokens:
        """Tokens of a text as it stands, int32 (T,)."""
        return np.asarray(self._encode(text, special=False), dtype=np.int32)

    def decode(self, token_ids: Tokens) -> str:
        """Text of sampled tokens, special tokens left out."""
        return cast("str", self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def info(self, dataset: PromptDataset, index: int, record: PromptRecord) -> PromptInfo:
        """Length of a prompt, and why it cannot be used if it cannot."""
        length = 0
        try:
            length = len(self._prompt_ids(record.prompt))
            self._check_length(length)
        except RolloutError as error:
            return PromptInfo(
                prompt_index=index,
                num_prompt_tokens=length,
                failure=error.failure,
                message=f"{dataset.where(index)}: {error}",
            )
        return PromptInfo(prompt_index=index, num_prompt_tokens=length)

    def _prompt_ids(self, prompt: str | list[Message]) -> list[int]:
        if self._templated:
            text = self._apply_template(self._with_system(_as_messages(prompt)))
            return self._encode(text, special=False)
        if isinstance(prompt, str):
            return self._without_end(self._encode(prompt, special=True), prompt)
        raise RolloutError(
            FailureClass.BAD_PROMPT, "chat messages need a chat template, and none is applied"
        )

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if not self._system_prompt:
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _apply_template(self, messages: list[Message]) -> str:
        try:
            return cast(
                "str",
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                ),
            )
        except Exception as error:  # boundary: templates are programs of the model's authors
            raise RolloutError(
                FailureClass.BAD_PROMPT,
                f"the chat template refused the messages: {type(error).__name__}: {error}",
            ) from error

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # Data and environments may have text that is not Unicode, which no tokenizer takes.
        encoded = self._tokenizer(well_formed(text), add_special_tokens=special)
        return cast("list[int]", encoded["input_ids"])

    def _token_text(self, token_id: int) -> str:
        return cast("str", self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _without_end(self, token_ids: list[int], text: str) -> list[int]:
        """Some tokenizers close every text; a prompt is to be continued."""
        end = self._tokenizer.eos_token_id
        closed = bool(token_ids) and token_ids[-1] == end
        if closed and not text.endswith(str(self._tokenizer.eos_token)):
            return token_ids[:-1]
        return token_ids

    def _check_length(self, length: int) -> None:
        if not length:
            raise RolloutError(FailureClass.BAD_PROMPT, "the prompt has no tokens")
        if length > self._max_prompt_length:
            raise RolloutError(
                FailureClass.OVER_LONG_PROMPT,
                f"the prompt has {length} tokens, "
                f"rollout.max_prompt_length is {self._max_prompt_length}",
            )


def read_record(dataset: PromptDataset, index: int) -> PromptRecord:
    """A prompt's record.

    Raises:
        RolloutError: its row cannot be used (`bad_prompt`).
    """
    try:
        return dataset.record(index)
    except DataError as error:
        raise RolloutError(FailureClass.BAD_PROMPT, str(error)) from error


def _as_messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _load_tokenizer(model_path: Path, trust_remote_code: bool) -> Tokenizer:
    try:
        return load_tokenizer(model_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # boundary: transformers raises what it likes
        raise ConfigError(
            f"model.path: no tokenizer could be loaded from {model_path}: "
            f"{type(error).__name__}: {error}"
        ) from error
