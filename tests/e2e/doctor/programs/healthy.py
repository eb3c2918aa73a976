"""Programs with which nothing is wrong: `python healthy.py KIND`. Prints "ready"."""

import asyncio
import concurrent.futures
import http.server
import multiprocessing
import sys
import threading
import time

ENDLESS = threading.Event()


def ready():
    print("ready", flush=True)  # noqa: T201  # the test reads it


def idle_loop():
    async def main():
        ready()
        await asyncio.Event().wait()

    asyncio.run(main())


def busy_loop():
    """Tasks that compute and yield in turn."""

    async def work():
        while True:
            sum(range(20_000))
            await asyncio.sleep(0)

    async def main():
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(work())
            ready()

    asyncio.run(main())


def thread_pool():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: time.sleep(0.05), range(4)))  # noqa: TID251  # starts all four
        ready()
        ENDLESS.wait()


def joined_main():
    """The main thread joins a worker thread that works on and off."""

    def work():
        while True:
            time.sleep(0.02)  # noqa: TID251  # a program without a loop

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    ready()
    worker.join()


def sync_sleep():
    ready()
    time.sleep(600)  # noqa: TID251  # a program without a loop


def notebook():
    """The threads of a notebook's kernel: a shell loop, an output loop, history, heartbeat."""
    for name in ("iopub", "control"):
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    threading.Thread(target=ENDLESS.wait, name="history", daemon=True).start()
    ready()
    asyncio.new_event_loop().run_forever()


def process_pool():
    with multiprocessing.Pool(2) as pool:
        pool.map(abs, range(8))
        ready()
        ENDLESS.wait()


def server():
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as one:
        ready()
        one.serve_forever()


def ask_from_thread():
    """A thread waits in result() for a coroutine on another thread's loop: as it should be."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="loop", daemon=True).start()
    future = asyncio.run_coroutine_threadsafe(asyncio.sleep(600), loop)
    ready()
    future.result()


def blocking_off_the_loop():
    """A loop that awaits blocking work in its executor."""

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(time.sleep, 600))  # noqa: TID251  # off the loop
            group.create_task(asyncio.to_thread(ENDLESS.wait))
            ready()

    asyncio.run(main())


def lock_turns():
    """Threads that take turns with a lock."""
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                sum(range(2_000))
            time.sleep(0.001)  # noqa: TID251  # a program without a loop

    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    ready()
    ENDLESS.wait()


def busy_threads():
    """One thread computes in Python all the time; another wants the interpreter now and then."""

    def tick():
        while True:
            time.sleep(0.01)  # noqa: TID251  # a program without a loop

    threading.Thread(target=tick, daemon=True).start()
    ready()
    number = 0
    while True:
        number += 1


globals()[sys.argv[1]]()
