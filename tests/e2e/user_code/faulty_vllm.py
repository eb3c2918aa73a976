"""vLLM replicas whose engine's process is struck in the middle of an update of its weights."""

import signal

import once
import psutil

from freewheel.backends.vllm.engine import VllmEngine

_UPDATES_BEFORE = 3


class _Struck(VllmEngine):
    number: signal.Signals
    num_sent = 0

    async def _send(self, update_info):
        """The tiny model is one chunk: after it, the weights are there and not yet in use."""
        await super()._send(update_info)
        self.num_sent += 1
        if self.num_sent == _UPDATES_BEFORE and once.claim("struck"):
            for child in psutil.Process().children(recursive=True):
                if "VLLM" in child.name():
                    child.send_signal(self.number)


class Killed(_Struck):
    """It dies."""

    number = signal.SIGKILL


class Stopped(_Struck):
    """It stands still."""

    number = signal.SIGSTOP
