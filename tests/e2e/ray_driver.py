"""A driver that starts a backend, prints what there is, and goes on until it is killed.

Not a test module: `test_ray_backend_lifetime.py` runs it as a process of its own.
"""

import asyncio
import signal

import psutil

from tests.e2e.ray_helpers import make_backend


def _say(*words):
    print(*words, flush=True)  # noqa: T201  # the test reads it


async def main():
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    backend = make_backend()
    await backend.start()
    replica = backend.replica(0)
    await replica.start()
    _say(*(child.pid for child in psutil.Process().children(recursive=True)))
    await interrupted.wait()
    _say((await replica.stats()).num_running)
    await asyncio.Event().wait()


asyncio.run(main())
