"""What the tests of rollouts share."""

import pytest

from tests.unit import rollout_usercode as user
from tests.unit.rollout_fakes import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of bytes and a chat template."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def user_code():
    """User code that waits is let go at the end of the test; what it has seen is forgotten."""
    user.RELEASE.clear()
    user.SEEN.clear()
    yield
    user.RELEASE.set()
