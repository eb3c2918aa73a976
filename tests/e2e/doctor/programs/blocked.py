"""Programs that are stuck in one known way each: `python blocked.py KIND`.

Prints "ready" when it is about to get stuck.
"""

import asyncio
import concurrent.futures
import ctypes
import fcntl
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from bridge import auto_await

ENDLESS = threading.Event()


def on_loop(block):
    """Run a function on a loop, in a callback, beside a task that the loop should serve."""

    async def main():
        asyncio.get_running_loop().call_later(0.1, block)
        print("ready", flush=True)  # noqa: T201  # the test reads it
        await asyncio.sleep(600)

    asyncio.run(main())


def result():
    pool = concurrent.futures.ThreadPoolExecutor(1)
    on_loop(lambda: pool.submit(ENDLESS.wait).result())


def futures():
    pool = concurrent.futures.ThreadPoolExecutor(1)
    on_loop(lambda: concurrent.futures.wait([pool.submit(ENDLESS.wait)]))


def shutdown():
    def block():
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(ENDLESS.wait)

    on_loop(block)


def thread_queue():
    on_loop(lambda: queue.Queue().get())


def simple_queue():
    numbers = queue.SimpleQueue()
    on_loop(lambda: numbers.get())


def process_queue():
    on_loop(lambda: multiprocessing.Queue().get())


def lock():
    taken = threading.Lock()

    def holder():
        with taken:
            ENDLESS.wait()

    threading.Thread(target=holder, name="holder", daemon=True).start()
    on_loop(lambda: taken.acquire())


def event():
    on_loop(lambda: ENDLESS.wait())


def join():
    thread = threading.Thread(target=ENDLESS.wait, daemon=True)
    thread.start()
    on_loop(thread.join)


def sleep():
    on_loop(lambda: time.sleep(600))  # noqa: TID251  # that is the pattern


def subprocess_wait():
    on_loop(lambda: subprocess.run(["sleep", "600"], check=False))


def os_system():
    on_loop(lambda: os.system("sleep 600"))


def socket_read():
    here, _there = socket.socketpair()
    on_loop(lambda: here.recv(1))


def http_read():
    import urllib.request

    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}/"
    on_loop(lambda: urllib.request.urlopen(address))


def file_lock():
    with tempfile.NamedTemporaryFile() as first, open(first.name, "rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        on_loop(lambda: fcntl.flock(second, fcntl.LOCK_EX))


def cycle():
    numbers = asyncio.Queue()

    @auto_await
    async def take():
        return await numbers.get()

    on_loop(lambda: take())


def frozen():
    @auto_await
    async def work():
        await asyncio.sleep(600)

    on_loop(lambda: work())


def own_loop():
    async def nothing():
        pass

    def block():
        asyncio.run_coroutine_threadsafe(nothing(), asyncio.get_running_loop()).result()

    on_loop(block)


def asks_back():
    """A pool thread waits for the loop, and the loop for the pool thread."""
    pool = concurrent.futures.ThreadPoolExecutor(1)

    async def nothing():
        pass

    def ask(loop):
        return asyncio.run_coroutine_threadsafe(nothing(), loop).result()

    on_loop(lambda: pool.submit(ask, asyncio.get_running_loop()).result())


class Account:
    """Two locks, taken in both orders."""

    def __init__(self):
        self.first, self.second = threading.Lock(), threading.Lock()
        self.both = threading.Barrier(2)

    def forth(self):
        with self.first:
            self.both.wait()
            with self.second:
                pass

    def back(self):
        with self.second:
            self.both.wait()
            with self.first:
                pass


def lock_cycle():
    account = Account()
    for name in ("forth", "back"):
        threading.Thread(target=getattr(account, name), name=name, daemon=True).start()
    print("ready", flush=True)  # noqa: T201
    ENDLESS.wait()


def lock_held():
    shared = threading.Lock()

    def holder():
        with shared:
            ENDLESS.wait()

    def waiter():
        with shared:
            pass

    threading.Thread(target=holder, name="holder", daemon=True).start()
    threading.Thread(target=waiter, name="waiter", daemon=True).start()
    print("ready", flush=True)  # noqa: T201
    ENDLESS.wait()


def gil():
    """A C function that is called with the interpreter lock held, while a loop wants to run."""

    async def beat():
        while True:  # noqa: ASYNC110  # a heartbeat
            await asyncio.sleep(0.01)

    threading.Thread(target=asyncio.run, args=(beat(),), name="beat", daemon=True).start()
    time.sleep(0.1)  # noqa: TID251  # until it beats
    print("ready", flush=True)  # noqa: T201
    ctypes.PyDLL(None).sleep(600)


def stopped():
    print("ready", flush=True)  # noqa: T201
    os.kill(os.getpid(), signal.SIGSTOP)


globals()[sys.argv[1]]()
