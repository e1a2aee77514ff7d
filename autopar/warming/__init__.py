"""Compilation of the kernels of a search before it starts, where no process has compiled them yet.

Compiling takes about a minute of processor time on a fresh machine. Left to their first calls, every worker process
would compile the same kernels, and a time limit would end before the first plan. So kernels that a search of usual
models calls are compiled at its start, by several processes, while the model is imported; the time limit counts without
the wait for them.

`kernels.json` lists them: module, function, and the numba types of the arguments of each version. Modules are compiled
one by one, for the kernels of a module call each other; the first in the file are those that take longest.
`python tests/record_kernels.py` writes the file.
"""

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module, resources
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING, Any, Self

from numba import types

from autopar.compiled import KERNELS, is_kept
from autopar.machine import follow_parent
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.search.process_executor import CALLER_SIGNALS, detached, open_server

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

Spelling = str | Mapping[str, Sequence[str]]
"""A numba type: "float64", "int64[2]" (a contiguous array of two dims), "const float64[1]" (one that cannot be written
to), or {"module:Class": fields} of a named tuple."""

_ARRAY = re.compile(r"(const )?(\w+)\[(\d)\]")
_BEHIND = 10
"""Niceness of processes that compile: until the first plan the one that imports the model goes first."""
POLL_SECONDS = 0.1
"""Longest time between two looks at the stop callback, and two lines of progress."""


@lru_cache
def listed() -> Mapping[str, Mapping[str, Sequence[Sequence[Spelling]]]]:
    """Return the kernels of `kernels.json`: by module and function the types of the arguments of each version."""
    known: dict[str, dict[str, list[list[Spelling]]]] = json.loads(
        resources.files("autopar.warming").joinpath("kernels.json").read_text()
    )
    return known


def missing() -> list[str]:
    """Return the listed modules with kernels that no process of this user has compiled yet."""
    return [module for module in listed() if any(not is_kept(*version) for version in _versions(module))]


class Warming:
    """Compilation of the missing kernels; a context manager that ends what is not done.

    It goes on in the background from its construction on. A kernel that is not compiled in the end, say because a
    process was killed, is by its first call.

    Args:
        processes: Processes that compile; with 0 this process does, in `finish`.
    """

    def __init__(self, processes: int) -> None:
        self._modules, self._processes = missing(), list[ForkServerProcess]()
        if not processes or not self._modules:
            return
        open_server()
        context = multiprocessing.get_context("forkserver")
        self._begun, self._done = context.Value("i", 0), context.Value("i", 0)
        work = (tuple(self._modules), self._begun, self._done)
        self._processes = [context.Process(target=_compile_modules, args=work, daemon=True) for _ in range(processes)]
        with detached():
            for process in self._processes:
                process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def finish(
        self,
        progress: ProgressCallback = silent,
        should_stop: StopCallback = never,
        meanwhile: Callable[[StopCallback], None] | None = None,
    ) -> float:
        """Wait until all are compiled, or compile them; return for how many seconds.

        Args:
            progress: Told how many modules are done.
            should_stop: Polled; once true the others are left to their first calls.
            meanwhile: What this process does while others compile; told when it is to stop.
        """
        start, total = time.monotonic(), len(self._modules)
        if not total:
            return 0.0
        if not self._processes:
            for done, module in enumerate(self._modules):
                progress(Progress("compile", done, total))
                compile_module(module, should_stop)
        if self._processes and meanwhile is not None:
            meanwhile(lambda: should_stop() or not self._compiles())
        while self._compiles() and not should_stop():
            progress(Progress("compile", self._done.value, total))
            wait([process.sentinel for process in self._processes if process.is_alive()], POLL_SECONDS)
        return time.monotonic() - start

    def _compiles(self) -> bool:
        return any(process.is_alive() for process in self._processes)


def compile_module(module: str, should_stop: StopCallback = never) -> None:
    """Compile the listed kernels of a module that are missing; those after `should_stop` turns true are left out."""
    for kernel, signature in _versions(module):
        if should_stop():
            return
        if not is_kept(kernel, signature):
            kernel.compile(signature)


def _versions(module: str) -> list[tuple[Any, tuple[types.Type, ...]]]:
    """Return the kernels of a module that have a place for machine code, with the argument types of each version."""
    import_module(module)
    return [
        (KERNELS[f"{module}:{function}"], tuple(map(_numba_type, signature)))
        for function, signatures in listed()[module].items()
        for signature in signatures
        if KERNELS[f"{module}:{function}"].has_place
    ]


def _numba_type(spelled: Spelling) -> types.Type:
    if not isinstance(spelled, str):
        ((name, fields),) = spelled.items()
        module, _, own = name.partition(":")
        return types.BaseTuple.from_types([_numba_type(field) for field in fields], getattr(import_module(module), own))
    found = _ARRAY.fullmatch(spelled)
    if found is None:
        return getattr(types, spelled)
    const, dtype, dims = found.groups()
    return types.Array(getattr(types, dtype), int(dims), "C", readonly=bool(const))


def _compile_modules(modules: Sequence[str], begun: "Synchronized[int]", done: "Synchronized[int]") -> None:
    """Compile the modules that no process beside this one has begun with."""
    for number in CALLER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    follow_parent()
    os.nice(_BEHIND)
    while True:
        with begun.get_lock():
            index = begun.value
            begun.value += 1
        if index >= len(modules):
            return
        compile_module(modules[index])
        with done.get_lock():
            done.value += 1
