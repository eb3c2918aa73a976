"""What all tests share."""

import os

from hypothesis import settings

# On CI the same examples each time, so that a change is judged by itself; elsewhere new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
