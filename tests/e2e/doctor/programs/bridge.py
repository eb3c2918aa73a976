"""A wrapper like the ones found in the field: an `async def` that sync callers may call too.

Finding a running loop and a caller that is not a coroutine, it runs the coroutine in a thread
pool and blocks in `future.result()`: on the loop's own thread.
"""

import asyncio
import concurrent.futures
import functools
import inspect

_POOL = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="bridge")


def auto_await(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        coroutine = function(*args, **kwargs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(coroutine)
        if _caller_is_coroutine():
            return coroutine
        return _POOL.submit(asyncio.run, coroutine).result()

    return wrapper


def _caller_is_coroutine():
    caller = inspect.currentframe().f_back.f_back
    return bool(caller.f_code.co_flags & inspect.CO_COROUTINE)
