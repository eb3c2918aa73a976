"""`python -m blocked_control_plane ...`: freewheel that blocks its own event loop."""

import sys
import time

from freewheel.cli.main import main
from freewheel.control.train_loop import TrainLoop

_after_step = TrainLoop._after_step


async def block_at_step_3(self):
    if self.state.step == 3:
        time.sleep(600)  # noqa: TID251, ASYNC251 - what is tested
    await _after_step(self)


TrainLoop._after_step = block_at_step_3

if __name__ == "__main__":
    sys.exit(main())
