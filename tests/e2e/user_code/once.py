"""Faults that happen once in a run, whichever process comes first."""

import os
import time
from pathlib import Path


def claim(fault: str) -> bool:
    """Whether this fault has not happened yet; from now on it has.

    The folder `FAULTS` holds a file for each, with its time on the machine's monotonic clock.
    """
    try:
        with Path(os.environ["FAULTS"], fault).open("x") as file:
            file.write(str(time.monotonic()))
    except FileExistsError:
        return False
    return True
