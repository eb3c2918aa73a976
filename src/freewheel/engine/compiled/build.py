"""Compiles `kernels.cpp` for this processor, once: the library lies in the cache folder.

Its name says what it was made from: source, compiler and processor. So machines that share a cache
folder never load each other's, and a new compiler or release makes a new one.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from freewheel.models import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILE_TIMEOUT_S = 300.0
"""It takes about 3 s; past this limit the machine is not able to do it."""

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=gnu++17", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")
_NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}


class CompileError(Exception):
    """There are no kernels here; the message says why."""


def library() -> Path:
    """The compiled kernels; compiles them if they are not in the cache.

    Raises:
        CompileError: no compiler is found ($CXX, else c++, g++ or clang++), or it fails.
    """
    command = [_compiler(), *_FLAGS, *_native_flag()]
    target = _cache() / f"kernels-{_fingerprint(command)}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".compile-", dir=target.parent) as folder:
            made = Path(folder) / target.name
            _run([*command, "-o", str(made), str(SOURCE)])
            made.replace(target)
    except OSError as error:
        raise CompileError(f"{target} cannot be written: {error}") from error
    return target


def _cache() -> Path:
    try:
        return cache_folder() / "kernels"
    except RuntimeError as error:  # there is no home folder
        raise CompileError(f"no cache folder: {error} (set $FREEWHEEL_CACHE)") from error


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else _COMPILERS:
        if (found := shutil.which(name)) is not None:
            return found
    raise CompileError(f"no C++ compiler: looked for {named or ', '.join(_COMPILERS)}")


def _native_flag() -> list[str]:
    flag = _NATIVE.get(platform.machine())
    return [flag] if flag else []


def _fingerprint(command: list[str]) -> str:
    """Digest of all that decides what the compiler makes."""
    version = _run([command[0], "--version"])
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


def _run(command: list[str]) -> str:
    """Run a compiler to its end; returns what it printed."""
    try:
        done = subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    return done.stdout
