"""Trainers whose second checkpoint cannot be written."""

import errno
import os
import time

from freewheel import files
from freewheel.trainer.core import TrainerCore


def _no_space(path, text):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class DiskFull(TrainerCore):
    """The disk takes no more from the second checkpoint on."""

    num_written = 0

    def write_state(self, *args):
        self.num_written += 1
        if self.num_written == 2:
            files.write_text = _no_space
        super().write_state(*args)


class DiskHangs(TrainerCore):
    """Writing the second checkpoint never returns."""

    num_written = 0

    def write_state(self, *args):
        self.num_written += 1
        if self.num_written == 2:
            time.sleep(600)  # noqa: TID251 - what is tested; in the thread that writes
        super().write_state(*args)
