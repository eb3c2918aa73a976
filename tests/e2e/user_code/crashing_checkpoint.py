"""`python -m crashing_checkpoint ...`: freewheel that dies as its third checkpoint appears."""

import os
import sys
from pathlib import Path

from freewheel import files
from freewheel.cli.main import main

_move = files.move
_moved: list[str] = []


def die_at_the_third(source: Path, target: Path) -> None:
    if target.name.startswith("step_"):
        _moved.append(target.name)
        if len(_moved) == 3:
            os._exit(9)
    _move(source, target)


files.move = die_at_the_third

if __name__ == "__main__":
    sys.exit(main())
