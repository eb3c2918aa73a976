"""`python -m hanging_disk ...`: freewheel whose own writing of the second checkpoint hangs."""

import sys
import time

from freewheel import files
from freewheel.cli.main import main

_move = files.move
_moved: list[str] = []


def hang_at_the_second(source, target):
    if target.name.startswith("step_"):
        _moved.append(target.name)
        if len(_moved) == 2:
            time.sleep(600)  # noqa: TID251 - what is tested; in the thread that writes
    _move(source, target)


files.move = hang_at_the_second

if __name__ == "__main__":
    sys.exit(main())
