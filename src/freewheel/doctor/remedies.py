"""What each pattern means and what to do about it, in words."""

from freewheel.doctor.waits import WaitKind

_FREEZES = (
    "While it waits, no other task of this loop runs: heartbeats, queues and results stand still, "
    "and if what it waits for needs this loop, it waits for ever."
)

# Per kind of wait: what happens, and what to do.
BLOCKED_LOOP: dict[WaitKind, tuple[str, str]] = {
    WaitKind.RESULT: (
        f"Code on the loop waits for a future of another thread. {_FREEZES}",
        "Make the calling function `async def` and await the future: "
        "`await asyncio.wrap_future(future)`, or `await loop.run_in_executor(...)`.",
    ),
    WaitKind.FUTURES: (
        f"Code on the loop waits for futures of other threads. {_FREEZES}",
        "Await them: `asyncio.wrap_future` for each, then `asyncio.wait` or a TaskGroup.",
    ),
    WaitKind.SHUTDOWN: (
        f"Leaving `with ...Executor()` waits for its threads or processes, on the loop. {_FREEZES}",
        "Keep the executor for the life of the program and await `loop.run_in_executor(...)`; shut "
        "it down off the loop, or with `shutdown(wait=False)`.",
    ),
    WaitKind.RAY_GET: (
        f"`ray.get` blocks the thread that runs the actor's loop. {_FREEZES} If the result comes "
        "from this same actor, it can never come.",
        "In an async actor await the reference itself: `await ref` (several: a TaskGroup or "
        "`asyncio.gather`).",
    ),
    WaitKind.RAY_WAIT: (
        f"`ray.wait` blocks the thread that runs the actor's loop. {_FREEZES}",
        "In an async actor use `await asyncio.wait([...])` on the references' futures "
        "(`asyncio.wrap_future(ref.future())`).",
    ),
    WaitKind.QUEUE: (
        f"A thread's queue is used on the loop. {_FREEZES}",
        "Use `asyncio.Queue` between tasks; from another thread, `loop.call_soon_threadsafe`. "
        "To read a thread's queue: `await asyncio.to_thread(queue.get)`.",
    ),
    WaitKind.SUBPROCESS: (
        f"Code on the loop waits for another process. {_FREEZES}",
        "Use `asyncio.create_subprocess_exec` and `await process.wait()` under a deadline.",
    ),
    WaitKind.JOIN: (
        f"Code on the loop waits for a thread to end. {_FREEZES}",
        "`await asyncio.to_thread(thread.join)`, or let the thread set an asyncio event through "
        "`loop.call_soon_threadsafe`.",
    ),
    WaitKind.EVENT: (
        f"A primitive of `threading` is waited for on the loop. {_FREEZES}",
        "Use the primitive of `asyncio` with the same name, set from other threads through "
        "`loop.call_soon_threadsafe`.",
    ),
    WaitKind.PIPE: (
        f"Code on the loop reads a pipe of `multiprocessing`. {_FREEZES}",
        "Read it in a thread: `await asyncio.to_thread(connection.recv)`, under a deadline.",
    ),
    WaitKind.SOCKET: (
        f"Code on the loop reads a socket, and the other side does not answer. {_FREEZES}",
        "Use an async client (asyncio streams, httpx.AsyncClient, aiohttp) with a timeout, or "
        "`asyncio.to_thread` for the blocking one.",
    ),
    WaitKind.RPC: (
        f"Code on the loop waits for a blocking gRPC call. {_FREEZES}",
        "Use `grpc.aio`, or `asyncio.to_thread`, with a timeout.",
    ),
    WaitKind.LOCK: (
        f"A lock of `threading` is taken on the loop while another holds it. {_FREEZES} If its "
        "holder needs the loop, this is a deadlock.",
        "Use `asyncio.Lock` among tasks. If threads share the lock, hold it only for statements "
        "that do not wait, or take it with `await asyncio.to_thread(lock.acquire)`.",
    ),
    WaitKind.SLEEP: (
        f"`time.sleep` stops the whole loop. {_FREEZES}",
        "Use `await asyncio.sleep(...)`.",
    ),
    WaitKind.FILE_LOCK: (
        f"Another process holds the lock of a file. {_FREEZES}",
        "Try it without blocking (LOCK_NB) and `await asyncio.sleep` in between, or take it in a "
        "thread, under a deadline.",
    ),
    WaitKind.INPUT: (
        f"Code on the loop waits for somebody to type. {_FREEZES}",
        "`await asyncio.to_thread(input)`, and no prompt in a process without a terminal.",
    ),
    WaitKind.NATIVE: (
        "Its thread waits in the kernel below this line, in a call without a Python frame (native "
        f"code, a lock, input or output). {_FREEZES}",
        "See what this line calls; move it off the loop with `asyncio.to_thread` if it blocks. "
        "`py-spy dump --native --pid PID` shows the native frames.",
    ),
}

CYCLE_REMEDY = (
    "Make every function from the loop down to this one `async def` and await the coroutine on "
    "its own loop, instead of asyncio.run in a thread and result(). On a Ray actor: make the "
    "method `async def`, and no plain decorator on it. Until then: let nothing in flight hold what "
    "the coroutine needs (drain before you call it), and give result() a timeout: then it raises."
)
FROZEN_REMEDY = (
    "Await the coroutine on the loop itself (`async def` all the way, no decorator that hides it "
    "from Ray), or call the wrapper from a thread: `await asyncio.to_thread(...)`."
)
OWN_LOOP_REMEDY = (
    "On the loop's own thread await the coroutine. run_coroutine_threadsafe(...).result() is for "
    "other threads; assert there that the loop is not the running one."
)
STOPPED_REMEDY = (
    "Continue it with `kill -CONT PID`, or leave the debugger that holds it. If nobody stopped it "
    "by hand, look for a job control or a container freezer."
)
LOCK_REMEDY = (
    "See why the holder does not leave its `with` block: that is the cause. Do not wait for others "
    "(results, queues, sleeps, I/O) while holding a lock."
)
LOCK_CYCLE_REMEDY = (
    "Take the locks in the same order everywhere, or use one lock for both; end the program, it "
    "cannot recover."
)
GIL_REMEDY = (
    "No Python thread of this process runs until that call returns: event loops, heartbeats and "
    "signals stand still. Move the call to another process, cut it into shorter ones, or use a "
    "version of it that releases the GIL (in C: Py_BEGIN_ALLOW_THREADS; ctypes.CDLL, not PyDLL)."
)
LOADER_REMEDY = (
    "See why the worker died (`dmesg` for the out-of-memory killer, /dev/shm full, a crash in a "
    "native decoder; num_workers=0 shows the error in the main process). Set a `timeout` of "
    "the DataLoader, so that it raises. End this process: the batch never comes."
)
LOADER_STOPPED_REMEDY = "Continue it with `kill -CONT PID`, or end the run."
COLLECTIVE_REMEDY = (
    "Examine all ranks together (`--pid` once for each): the one that is elsewhere is the cause. "
    "Set `timeout=` of init_process_group; NCCL: TORCH_NCCL_ASYNC_ERROR_HANDLING=1, "
    "TORCH_NCCL_TRACE_BUFFER_SIZE for the flight recorder."
)
JOIN_GROUP_REMEDY = (
    "Not all ranks have started, or they disagree on MASTER_ADDR, MASTER_PORT, WORLD_SIZE or RANK. "
    "Check that every rank runs and reaches the address; set `timeout=` of init_process_group."
)
