"""What all tests share."""

import os

import pytest
from hypothesis import settings

from freewheel.models import cache_folder

# On CI the same examples each time, so that a change is judged by itself; elsewhere new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """A cache folder that knows of no model yet, and is left to nobody.

    Compiled kernels and converted models, which take long to make, are the user's own.
    """
    users, folder = cache_folder(), tmp_path_factory.mktemp("cache")
    (users / "kernels").mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in users.iterdir():
        if entry.name != "models":
            (folder / entry.name).symlink_to(entry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FREEWHEEL_CACHE", str(folder))
        yield
