import json

import pytest

from freewheel.config.sections import Config, DataConfig, RolloutConfig
from freewheel.errors import ConfigError, FailureClass, RolloutError
from freewheel.rollout.render import Renderer
from tests.unit.rollout_fakes import END, write_tokenizer


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("plain"), template=None, bos=True)


def renderer(folder, *, max_prompt_length=200, **data) -> Renderer:
    config = Config(
        data=DataConfig(**data), rollout=RolloutConfig(max_prompt_length=max_prompt_length)
    )
    return Renderer(config, folder)


def shown(renderer: Renderer, token_ids) -> str:
    return renderer._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)


def test_a_text_becomes_a_user_message(chat):
    at = renderer(chat)
    assert shown(at, at.prompt("2+2")) == (
        f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\n2+2{END}\n<|im_start|>assistant\n"
    )
    assert at.prompt("2+2").tolist() == at.prompt([{"role": "user", "content": "2+2"}]).tolist()


def test_the_system_prompt_goes_first(chat):
    at = renderer(chat, system_prompt="Think.")
    assert shown(at, at.prompt("x")).startswith(
        f"<|im_start|>system\nThink.{END}\n<|im_start|>user"
    )


def test_the_template_can_be_left_out(chat):
    at = renderer(chat, apply_chat_template=False)
    assert shown(at, at.prompt("2+2")) == "2+2"
    with pytest.raises(RolloutError, match="need a chat template") as caught:
        at.prompt([{"role": "user", "content": "x"}])
    assert caught.value.failure is FailureClass.BAD_PROMPT


def test_plain_text_gets_the_tokenizer_s_start_but_not_its_end(plain):
    at = renderer(plain)
    assert shown(at, at.prompt("2+2")) == "<s>2+2"
    assert shown(at, at.text("2+2")) == "2+2"
    assert shown(at, at.continuation(" more", last_token_id=0)) == " more"
    with pytest.raises(RolloutError, match="need a chat template") as caught:
        at.continuation([{"role": "user", "content": "x"}], last_token_id=0)
    assert caught.value.failure is FailureClass.ENVIRONMENT


def test_a_template_that_is_not_there(plain):
    with pytest.raises(ConfigError, match="has no chat template"):
        renderer(plain, apply_chat_template=True)


def test_a_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=f"no tokenizer could be loaded from {tmp_path}"):
        renderer(tmp_path)


def test_lengths(chat):
    at = renderer(chat, apply_chat_template=False, max_prompt_length=3)
    assert len(at.prompt("abc")) == 3
    with pytest.raises(
        RolloutError, match=r"has 4 tokens, rollout\.max_prompt_length is 3"
    ) as caught:
        at.prompt("abcd")
    assert caught.value.failure is FailureClass.OVER_LONG_PROMPT


def test_a_template_that_refuses(chat):
    with pytest.raises(RolloutError, match=r"the chat template refused.*no role alien") as caught:
        renderer(chat).prompt([{"role": "alien", "content": "x"}])
    assert caught.value.failure is FailureClass.BAD_PROMPT


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("added", ["again?", [{"role": "tool", "content": "7"}]])
def test_a_conversation_rendered_turn_by_turn_is_the_one_rendered_whole(chat, ended, added):
    at = renderer(chat)
    said = at.text(f"4{END}" if ended else "4").tolist()
    piecewise = [
        *at.prompt("2+2").tolist(),
        *said,
        *at.continuation(added, last_token_id=said[-1]).tolist(),
    ]
    messages = [{"role": "user", "content": added}] if isinstance(added, str) else added
    whole = at.prompt(
        [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}, *messages]
    )
    assert piecewise == whole.tolist()


def test_decode_leaves_special_tokens_out(chat):
    at = renderer(chat)
    assert at.decode(at.text(f"caf\u00e9{END}")) == "caf\u00e9"


def test_a_saved_truncation_is_not_applied(tmp_path):
    folder = write_tokenizer(tmp_path)
    path = folder / "tokenizer.json"
    saved = json.loads(path.read_text())
    saved["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    path.write_text(json.dumps(saved))
    assert len(renderer(folder, apply_chat_template=False).prompt("abcdef")) == 6
