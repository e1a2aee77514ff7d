"""Functions compiled to machine code by numba: the hot loops that numpy has no words for.

Machine code is kept between processes, in files that numba runs without a question. So it is kept only where nobody
else can write: beside the source, whose bytecode Python trusts in the same way, or in a folder that is the user's own.
"""

import grp
import os
import pwd
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import JobError

KERNELS: dict[str, "Kernel"] = {}
"""Kernels whose modules are imported, by `module:function`."""

F = TypeVar("F", bound=Callable[..., Any])
_LOCK = threading.RLock()
"""Held while a function is given to numba."""


class Kernel:
    """A function that numba compiles on its first call; numba is imported then, which takes a third of a second.

    Whatever else is asked of it is asked of numba's dispatcher.

    Args:
        function: The function.
        is_inner: Whether other kernels alone call it.
    """

    def __init__(self, function: Callable[..., Any], *, is_inner: bool = False) -> None:
        self.function, self.is_inner = function, is_inner
        self._dispatcher: Any = None

    def __call__(self, *args: Any) -> Any:
        """Call the machine code."""
        return self.dispatcher(*args)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dispatcher."""
        return getattr(self.dispatcher, name)

    @property
    def has_place(self) -> bool:
        """Whether there is a folder that its machine code can be kept in."""
        return hasattr(self.dispatcher._cache, "_cache_file")

    @property
    def dispatcher(self) -> Any:
        """What numba makes of the function.

        Raises:
            JobError: If others may write to the folder of the cache.
        """
        with _LOCK:
            if self._dispatcher is None:
                self._dispatcher = _dispatcher(self.function, self.is_inner)
                names = self.function.__globals__
                for name, other in list(names.items()):  # numba calls other kernels as dispatchers only
                    if isinstance(other, Kernel):
                        names[name] = other.dispatcher
            return self._dispatcher


def compiled(function: F) -> F:
    """Return `function` compiled on its first call; later processes find the machine code in a cache.

    Its first call raises a `JobError` if others may write to the folder of the cache.
    """
    kernel: Any = Kernel(function)
    KERNELS[f"{function.__module__}:{function.__qualname__}"] = kernel
    return kernel  # type: ignore[no-any-return]


def inner(function: F) -> F:
    """Return `function` compiled for calls by other kernels; it compiles faster than one that Python can call, too."""
    return Kernel(function, is_inner=True)  # type: ignore[return-value]


def _dispatcher(function: Callable[..., Any], is_inner: bool) -> Any:
    """Return numba's dispatcher of a function, with its machine code kept where nobody else can write."""
    import numba
    from numba.core.caching import FunctionCache

    class Kept(FunctionCache):  # type: ignore[misc]
        """Machine code on disk; a disk that is full or read-only costs no more than compiling again."""

        def save_overload(self, sig: Any, data: Any) -> None:
            """Keep the machine code of one signature."""
            with suppress(OSError):
                super().save_overload(sig, data)

    kernel: Any = numba.njit(nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=is_inner)(function)
    if is_inner:  # its machine code is part of that of its callers
        return kernel
    try:
        kept = Kept(function)
    except RuntimeError:  # neither the folder of the source nor one of the user can be written to
        return kernel
    folder = Path(kept.cache_path)
    if folder != Path(function.__code__.co_filename).parent / "__pycache__":
        _check_private(folder)
    kernel._cache = kept
    return kernel


def is_kept(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """Whether machine code of a kernel for arguments of some numba types is on disk, from this process or another."""
    kept = kernel._cache
    target = kernel.targetctx.codegen()
    return kept._index_key(signature, target) in kept._cache_file._load_index()


@lru_cache
def _check_private(folder: Path) -> None:
    """Check that nobody else can put files into a folder, or another folder in its place.

    Raises:
        JobError: If somebody can.
    """
    for each in (folder, *folder.resolve().parents):
        status = each.stat()
        own = status.st_uid in (0, os.geteuid())
        is_sticky = each != folder and status.st_mode & stat.S_ISVTX  # there others cannot rename what is not theirs
        by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
        if not own or ((status.st_mode & stat.S_IWOTH or by_group) and not is_sticky):
            raise JobError(
                f"numba would run machine code from {str(folder)!r}, and others may write to {str(each)!r}",
                hint=f"chmod go-w {each}, or set NUMBA_CACHE_DIR to a folder of your own",
            )


def _is_own_group(group: int) -> bool:
    """Whether a group is that of one user alone: many systems give each user a group of the same name."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
