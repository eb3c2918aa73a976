"""A named thread for calls that block, so that none of them runs on the event loop."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


class CallThread:
    """Runs calls one after the other, in the order they were given.

    A daemon, unlike the threads of `ThreadPoolExecutor` and of `asyncio.to_thread`: a call that
    never returns (a hanging disk, Ray) must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Answer], *args: object) -> "Future[Answer]":
        """Queue a call; returns at once."""
        future: Future[Answer] = Future()

        def perform() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001  # goes to whoever waits for the call
                future.set_exception(error)

        self._calls.put(perform)
        return future

    async def run(self, call: Callable[..., Answer], *args: object) -> Answer:
        """Queue a call and await its answer. Cancelling drops the call if it has not begun."""
        return await asyncio.wrap_future(self.submit(call, *args))

    def close(self) -> None:
        """End the thread after the calls that are queued. Idempotent; does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (perform := self._calls.get()) is not None:
            perform()
