"""What users write, for the tests: good, bad and ugly."""

import asyncio
import functools
import sys
import threading

from freewheel.rollout import Episode, RewardResult, SyncEpisode, ToolTimeoutError

RELEASE = threading.Event()
"""Set at the end of each test, so that what ignores its cancellation ends at last."""
SEEN: list[object] = []

NOT_CALLABLE = 5


def wait_blocking(limit_s: float = 30.0) -> None:
    RELEASE.wait(limit_s)


async def wait_stubbornly() -> None:
    while not RELEASE.is_set():
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            SEEN.append("cancellation ignored")


def plain_reward(response, ground_truth):
    return 0.25 if response == ground_truth else 0.0


async def async_reward(response, ground_truth, *, prompt, extra, bonus=0.0):
    await asyncio.sleep(0)
    SEEN.append((prompt, extra, threading.current_thread().name))
    return RewardResult(reward=1.0 + bonus, answer=response.upper())


def wrapped_reward(response, ground_truth):
    """Looks sync, is async."""
    return async_reward(response, ground_truth, prompt="", extra={})


def needs_more(response, ground_truth, tests):
    return 0.0


def raising_reward(response, ground_truth):
    raise KeyError("no such thing")


def exiting_reward(response, ground_truth):
    sys.exit(3)


def nan_reward(response, ground_truth):
    return float("nan")


def text_reward(response, ground_truth):
    return "1.0"


def none_reward(response, ground_truth):
    return None


def blocking_reward(response, ground_truth):
    if response.startswith("slow"):
        wait_blocking()
    return 1.0


async def endless_reward(response, ground_truth):
    if response.startswith("slow"):
        await asyncio.Event().wait()
    return 1.0


class TwoTurns:
    """Asks again after the first answer."""

    async def run(self, episode: Episode) -> RewardResult:
        first = await episode.generate()
        assert await episode.add_text("[tool]")
        middle = await episode.generate(temperature=0.0, stop="x", max_tokens=3)
        last = await episode.generate("again?")
        SEEN.append((first.text, middle.text, last.text, last.finish_reason))
        return await episode.reward(last.text)


class AlwaysGreedy:
    async def run(self, episode: Episode) -> RewardResult:
        turn = await episode.generate(temperature=0.0)
        return await episode.reward(turn.text)


class SyncTwoTurns:
    """The same in a thread."""

    def run(self, episode: SyncEpisode) -> float:
        SEEN.append((threading.current_thread().name, episode.sample_id, episode.purpose))
        first = episode.generate()
        second = episode.generate([{"role": "tool", "content": first.text}])
        return episode.reward(second.text).reward


class OwnPrompt:
    async def run(self, episode: Episode) -> float:
        await episode.generate(f"my own {episode.prompt.prompt} {episode.extra['n']}")
        return 0.5


class Talkative:
    """Adds more than there is room for."""

    async def run(self, episode: Episode) -> float:
        turns = [await episode.generate()]
        turns += [await episode.generate("x" * 60) for _ in range(5)]
        SEEN.append([(turn.text, turn.finish_reason) for turn in turns])
        return 1.0


class Never:
    """Hangs where the ground truth says so, else is quick."""

    async def run(self, episode: Episode) -> float:
        await episode.generate()
        if episode.sample_id == "s0":
            await asyncio.Event().wait()
        return 1.0


class Stubborn:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        if episode.sample_id == "s0":
            await wait_stubbornly()
            try:
                await episode.generate("late")
            except Exception as error:
                SEEN.append(str(error))
                raise
        return 1.0


class Blocking:
    """Async, and blocks the event loop."""

    async def run(self, episode: Episode) -> float:
        await episode.generate()
        if episode.sample_id == "s0":
            wait_blocking()
        return 1.0


class BlockingLater:
    """One rollout blocks the event loop, in a task of its own, while the others generate."""

    async def run(self, episode: Episode) -> float:
        await episode.generate()
        if episode.sample_id == "s0":
            await asyncio.sleep(0.2)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._block())
        await episode.generate("more")
        return 1.0

    async def _block(self) -> None:
        wait_blocking()


class BlocksForAMoment:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        if episode.sample_id == "s0":
            wait_blocking(0.7)
        SEEN.append(threading.current_thread().name)
        return 1.0


class BlockingSync:
    def run(self, episode: SyncEpisode) -> float:
        episode.generate()
        if episode.sample_id == "s0":
            wait_blocking()
            try:
                episode.generate("late")
            except Exception as error:
                SEEN.append(str(error))
                raise
        return 1.0


async def blocking_async_reward(response, ground_truth):
    wait_blocking()
    return 1.0


class HidesARewardThatBlocks:
    def run(self, episode: SyncEpisode) -> float:
        text = episode.generate().text
        try:
            return episode.reward(text).reward
        except Exception:  # noqa: BLE001  # what is tested
            return 0.0


def add(a, b):
    SEEN.append(threading.current_thread().name)
    return a + b


async def add_async(a, b):
    await asyncio.sleep(0)
    return add(a, b)


def hidden_async(a, b):
    """Looks sync, is async."""
    return add_async(a, b)


def blocking_tool(limit_s=30.0):
    wait_blocking(limit_s)


async def tool_that_blocks_its_loop():
    wait_blocking()


async def tool_that_waits():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        SEEN.append("tool cancelled")
        raise


def raising_tool():
    raise LookupError("no such page")


def exiting_tool():
    sys.exit(3)


TOOLS = (blocking_tool, tool_that_blocks_its_loop, tool_that_waits, raising_tool, exiting_tool)


class UsesTools:
    async def run(self, episode: Episode) -> float:
        turn = await episode.generate()
        results = [await episode.call_tool(tool, 2, 3) for tool in (add, add_async, hidden_async)]
        results.append(await episode.call_tool(functools.partial(add, b=4), 1))
        await episode.generate([{"role": "tool", "content": f"{turn.text} {results}"}])
        return sum(results)


class SyncUsesTools:
    def run(self, episode: SyncEpisode) -> float:
        episode.generate()
        return sum(episode.call_tool(tool, 2, 3) for tool in (add, add_async, hidden_async))


class CallsTool:
    """Calls the tool that the ground truth names; catches its time-out where `n` is 1."""

    async def run(self, episode: Episode) -> float:
        await episode.generate()
        tool = next(tool for tool in TOOLS if tool.__name__ == episode.ground_truth)
        try:
            await episode.call_tool(tool)
        except ToolTimeoutError as error:
            if episode.extra["n"] != 1:
                raise
            await episode.generate([{"role": "tool", "content": str(error)}])
            return 0.5
        return 1.0


class CallsToolOfItsOwnLimit:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        await episode.call_tool(blocking_tool, name="search", timeout_s=0.2)
        return 1.0


class CatchesWhatAToolRaises:
    def run(self, episode: SyncEpisode) -> float:
        episode.generate()
        try:
            episode.call_tool(raising_tool)
        except LookupError as error:
            SEEN.append(str(error))
        return 0.25


class LeavesAToolBehind:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        task = asyncio.get_running_loop().create_task(episode.call_tool(tool_that_waits))
        SEEN.append(task)
        await asyncio.sleep(0.1)
        return 1.0


class BlockingConstructor:
    def __init__(self) -> None:
        wait_blocking()

    async def run(self, episode: Episode) -> float:
        return 0.0


class Raising:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        if episode.sample_id == "s0":
            raise ValueError("the tool broke")
        return 1.0


class RaisingHalfAnEmoji:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        raise ValueError("unknown tool \ud83d")


class AddsHalfAnEmoji:
    async def run(self, episode: Episode) -> float:
        await episode.generate("the tool says \ud83d")
        await episode.add_text("\ud83d")
        await episode.generate("\ud83d")
        return 1.0


class Exiting:
    async def run(self, episode: Episode) -> float:
        sys.exit("enough")


class CancelsItself:
    async def run(self, episode: Episode) -> float:
        raise asyncio.CancelledError


class Silent:
    async def run(self, episode: Episode) -> float:
        return 1.0


class NotANumber:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        return float("inf")


class CatchesAll:
    """The commonest bug: every failure becomes a zero."""

    async def run(self, episode: Episode) -> float:
        try:
            await episode.generate()
        except Exception:  # noqa: BLE001  # what is tested
            return 0.0
        return 1.0


class GivesUpATurn:
    """Cuts its own generation and goes on."""

    async def run(self, episode: Episode) -> float:
        try:
            async with asyncio.timeout(0.1):
                await episode.generate()
        except TimeoutError:
            SEEN.append("own timeout")
        return (await episode.reward((await episode.generate()).text)).reward


class Misspelt:
    async def run(self, episode: Episode) -> float:
        await episode.generate(temprature=1.0)
        return 0.0


class Alien:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        await episode.generate([{"role": "alien", "content": "?"}])
        return 0.0


class AtOnce:
    async def run(self, episode: Episode) -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(episode.generate())
            group.create_task(episode.generate())
        return 0.0


class LeavesATurnBehind:
    async def run(self, episode: Episode) -> float:
        await episode.generate()
        task = asyncio.get_running_loop().create_task(episode.generate("more"))
        SEEN.append(task)
        await asyncio.sleep(0.05)
        return 1.0


class NoRun:
    pass
