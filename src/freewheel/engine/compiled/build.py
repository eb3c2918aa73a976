"""Compiles `kernels.cpp` for this processor, once: the library lies in the cache folder.

Its name is a digest of what it was made from: source, compiler and processor. So machines that
share a cache folder load only what was made for a processor, and by a compiler, like theirs.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freewheel.files import sync_folder
from freewheel.models import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILE_TIMEOUT_S = 120.0
"""It takes about 3 s; past this limit the machine is not able to do it."""
_ASK_TIMEOUT_S = 20.0
"""For a compiler to say which one it is."""

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=gnu++17", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}


class CompileError(Exception):
    """There are no kernels here; the message says why."""


def load() -> Any:
    """The kernels, loaded; compiled if they are not in the cache, or are damaged there.

    Raises:
        CompileError: no compiler is found ($CXX, else c++, g++ or clang++), all of them fail, or
            what they make cannot be loaded.
    """
    problems: list[str] = []
    for command in _commands():
        try:
            return _load(command)
        except (CompileError, OSError) as error:
            problems.append(str(error))
    raise CompileError("; ".join(problems))


def _load(command: list[str]) -> Any:
    """With one compiler. What is in the cache and cannot be loaded is made anew."""
    target = _cache() / f"kernels-{_fingerprint(command)}.so"
    if target.is_file():
        try:
            return ctypes.CDLL(str(target))
        except OSError:
            target.unlink()
    _compile(command, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise CompileError(f"{target} cannot be loaded: {error}") from error


def _compile(command: list[str], target: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(prefix=".compile-", dir=target.parent) as folder:
            made = Path(folder) / target.name
            _run([*command, "-o", str(made), str(SOURCE)], COMPILE_TIMEOUT_S)
            sync_folder(made)
            made.replace(target)
    except OSError as error:
        raise CompileError(f"{target} cannot be written: {error}") from error


def _cache() -> Path:
    """The folder, which nobody else may write to: what lies in it is run."""
    try:
        folder = cache_folder() / "kernels"
    except RuntimeError as error:  # there is no home folder
        raise CompileError(f"no cache folder: {error} (set $FREEWHEEL_CACHE)") from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid not in (os.geteuid(), 0) or about.st_mode & stat.S_IWOTH:
        raise CompileError(f"{folder}: another user could put code there (set $FREEWHEEL_CACHE)")
    return folder


def _commands() -> Iterator[list[str]]:
    """How each compiler that is here is called, as far as that does not depend on the files."""
    named = shlex.split(os.environ.get("CXX", ""))
    wanted = [named] if named else [[name] for name in _COMPILERS]
    found = [[path, *rest] for name, *rest in wanted if (path := shutil.which(name)) is not None]
    if not found:
        names = ", ".join(name for name, *_ in wanted)
        raise CompileError(f"no C++ compiler: looked for {names}")
    for compiler in found:
        yield [*compiler, *_FLAGS, *_native_flag()]


def _native_flag() -> list[str]:
    flag = _NATIVE.get(platform.machine())
    return [flag] if flag else []


def _fingerprint(command: list[str]) -> str:
    """Digest of all that decides what the compiler makes."""
    version = _run([command[0], "--version"], _ASK_TIMEOUT_S)
    parts = [*command, version, _processor(), SOURCE.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Model and abilities of the first processor, as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(kept))


def _run(command: list[str], timeout_s: float) -> str:
    """Run a compiler to its end; returns what it printed."""
    try:
        done = subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} took longer than {timeout_s:.0f} s") from error
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    return done.stdout
