"""Loads the C kernel (``fused_step.c``); builds it on first use with gcc or clang and keeps it in the user's cache."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("fused_step.c")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fprefetch-loop-arrays",
    "-fPIC",
)


class BuildError(Exception):
    """No compiler, or it failed; the caller falls back to another backend."""


_FAILURES: list[BuildError] = []
"""The first failure of this process: a compiler that failed once is not tried again."""


def load(defines: tuple[str, ...]) -> ctypes.CDLL:
    """The kernel compiled with these ``-D`` flags, from the cache or built now; after a failure nothing is tried."""
    if _FAILURES:
        raise _FAILURES[0]
    try:
        return _load(defines)
    except BuildError as error:
        _FAILURES.append(error)
    except OSError as error:
        _FAILURES.append(BuildError(f"the kernel cannot be built or loaded: {error}"))
    raise _FAILURES[0]


def failure() -> BuildError | None:
    """Why a kernel could not be built or loaded in this process, if one could not."""
    return _FAILURES[0] if _FAILURES else None


@cache
def _load(defines: tuple[str, ...]) -> ctypes.CDLL:
    named = shlex.split(os.environ.get("CC", ""))
    compiler = named or [path for path in map(shutil.which, ("gcc", "clang", "cc")) if path][:1]
    if not compiler:
        raise BuildError("no C compiler was found (looked for $CC, gcc, clang, cc)")
    folder, name = cache_directory(), f"fused-{_fingerprint(compiler, defines)}"
    path = _stored(folder, name) or _build(compiler, defines, folder, name)
    library = ctypes.CDLL(str(path))
    library.poprisk_step.restype = ctypes.c_int64
    library.poprisk_step.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3, ctypes.c_int64]
    return library


def cache_directory() -> Path:
    """``$POPRISK_CACHE_DIR``, else the user's cache folder, else (where that is read-only) a temporary one.

    Only folders that belong to this user and that nobody else may write, because code is loaded from there.
    """
    from poprisk._core.store import is_private

    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
    candidates = [
        os.environ.get("POPRISK_CACHE_DIR"),
        os.path.join(home, "poprisk"),
        os.path.join(tempfile.gettempdir(), f"poprisk-{user}"),
    ]
    for folder in filter(None, candidates):
        if not os.path.isabs(folder):
            continue  # it would be another one in every directory that someone sends
        try:
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and is_private(folder):
            return Path(folder)
    raise BuildError("no writable cache folder; set POPRISK_CACHE_DIR")


def _stored(folder: Path, name: str) -> Path | None:
    """A kernel built before whose content has the SHA-256 that its name says; damaged ones are removed."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        if path.name == f"{name}-{_digest(path)}.so":
            return path
        path.unlink(missing_ok=True)
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _build(compiler: list[str], defines: tuple[str, ...], folder: Path, name: str) -> Path:
    """Compile aside, then rename, so that two processes may build at once.

    OpenMP is compiled in but not linked: its symbols come from the runtime torch has loaded already, so that there is
    one pool of threads and not two. Where torch brings none, the kernel is linked with the compiler's own.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = f"{scratch}/kernel.o", f"{scratch}/kernel.so"
        _call([*compiler, *FLAGS, "-fopenmp", *defines, "-c", str(SOURCE), "-o", compiled])
        _call([*compiler, "-shared", compiled, "-o", linked])
        try:
            ctypes.CDLL(linked, mode=os.RTLD_NOW)
        except OSError:
            _call([*compiler, "-shared", "-fopenmp", compiled, "-o", linked])
        path = folder / f"{name}-{_digest(Path(linked))}.so"
        os.replace(linked, path)
    return path


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise BuildError(
            f"{command[0]} failed: {done.stderr.strip().splitlines()[-1] if done.stderr else 'no message'}"
        )


def _fingerprint(compiler: list[str], defines: tuple[str, ...]) -> str:
    """Source, flags, compiler, torch and processor: ``-march=native`` code must not travel to another machine."""
    import torch

    try:
        processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        processor = platform.processor()
    parts = [SOURCE.read_text(), *FLAGS, *defines, *compiler, torch.__version__, platform.machine(), processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
