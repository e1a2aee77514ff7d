"""onnx's C++ library, and ops whose cost is not known beforehand, in a process of their own.

A file may hold what makes the library crash, loop or ask for all memory: shapes are inferred, local functions inlined
and old opsets converted where that costs a message and not the caller's process. The process is started from nothing
(`isolated_server`), because the caller's may have threads and cannot be forked; it is kept for the next import.
"""

import atexit
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ExecutionError, stopped
from autopar.ir.graph import Attr
from autopar.ir.text import numpy_dtype
from autopar.onnx import isolated_server
from autopar.progress import StopCallback, never

_POLL_MILLISECONDS = 100
"""How often a waiting caller looks whether it should stop."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Arrays of an import are small."""


class RefusedError(Exception):
    """What the library says against a request, or what ended its process; the caller adds what it was asked about."""


class Isolated:
    """A process that answers requests, one at a time.

    Args:
        seconds: Processor time of a request; milliseconds are usual. A whole model gets more.

    Attributes:
        should_stop: Polled while a request is being answered.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.should_stop: StopCallback = never
        self._owner = os.getpid()
        self._in_step = True
        command = [sys.executable, "-I", "-S", isolated_server.__file__, _library_file(), str(seconds)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # Ctrl-C is for the caller
            )
        except OSError as error:
            raise ExecutionError(
                f"models cannot be checked in a process of their own: {error}",
                hint=f"see whether {sys.executable!r} starts",
            ) from error

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it is alive, waits for a request and is ours; after a fork it is our parent's."""
        return self._owner == os.getpid() and self._in_step and self._process.poll() is None

    def infer(
        self,
        schema: tuple[str, int, str],
        node: bytes,
        types: Mapping[str, bytes],
        data: Mapping[str, bytes],
        opsets: Mapping[str, int],
        ir_version: int,
    ) -> Mapping[str, bytes]:
        """Return the serialized types of a node's outputs.

        Args:
            schema: Op type, version and domain.
            node: The serialized node.
            types: Serialized types of its inputs by name.
            data: Serialized tensors of the inputs whose elements are known.
            opsets: Versions by domain.
            ir_version: Version of the file format.

        Raises:
            RefusedError: If the inputs do not fit the op.
        """
        found: Mapping[str, bytes] = self._ask("infer", schema, node, types, data, opsets, ir_version)
        return found

    def inline(self, model: bytes) -> bytes:
        """Return a serialized model without local functions.

        Raises:
            RefusedError: If they cannot be inlined.
        """
        inlined: bytes = self._ask("inline", model)
        return inlined

    def convert(self, model: bytes, opset: int) -> bytes:
        """Return a serialized model brought to another opset.

        Raises:
            RefusedError: If an op has no form there.
        """
        converted: bytes = self._ask("convert", model, opset)
        return converted

    def check(self, model: bytes) -> None:
        """Check a serialized model, and that the types it states are those that are inferred.

        Raises:
            RefusedError: If they are not.
        """
        self._ask("check", model)

    def run_kind(
        self,
        kind: str,
        attrs: tuple[tuple[str, Attr], ...],
        inputs: Sequence[NDArray[Any] | None],
        num_outputs: int,
        opset: int,
        name: str = "",
    ) -> tuple[NDArray[Any], ...]:
        """Run an op, see `autopar.execute.Executor.run_kind`.

        Raises:
            RefusedError: If the op does not take these inputs, or takes too much time or memory.
        """
        packed = tuple(
            None if array is None else (str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes())
            for array in inputs
        )
        path = [str(folder) for folder in sys.path]
        results = self._ask("run", path, kind, attrs, packed, num_outputs, opset, name)
        return tuple(np.frombuffer(data, numpy_dtype(dtype)).reshape(shape) for dtype, shape, data in results)

    def end(self) -> None:
        """End the process at once, if it is ours, and let go of it."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stdin):
            assert stream is not None, "a pipe"
            with suppress(BrokenPipeError):  # part of a request was still to be written
                stream.close()

    def _ask(self, what: str, *arguments: object) -> Any:
        assert self._process.stdin is not None, "a pipe"
        self._in_step = False
        try:
            isolated_server.send(self._process.stdin, (what, arguments))
            answer = self._answer()
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise RefusedError(f"onnx {self._end()}")
        self._in_step = True
        succeeded, result = answer
        if not succeeded:
            raise RefusedError(result)
        return result

    def _answer(self) -> Any:
        """Return the next message of the process; None if it ended.

        Raises:
            InterruptedSearchError: If the caller is asked to stop.
        """
        assert self._process.stdout is not None, "a pipe"
        waiting = select.poll()
        waiting.register(self._process.stdout, select.POLLIN)
        while not waiting.poll(_POLL_MILLISECONDS):
            if self.should_stop():
                raise stopped()
        return isolated_server.receive(self._process.stdout)

    def _end(self) -> str:
        """Return what ended the process."""
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return "does not come to an end with it in the processor time allowed"
        return f"crashes on it ({signal.Signals(-code).name})" if code < 0 else f"ends on it with exit code {code}"


_idle: list[Isolated] = []
"""Processes between two imports."""


@contextmanager
def isolated(should_stop: StopCallback = never) -> Iterator[Isolated]:
    """Lend a process: an idle one, or a new one, which gets ready while the caller goes on.

    Raises:
        ExecutionError: If none can be started.
    """
    process = _idle.pop() if _idle else Isolated()
    while not process.usable:  # it died meanwhile, or it is the one of the process we were forked from
        process.end()
        process = _idle.pop() if _idle else Isolated()
    process.should_stop = should_stop
    try:
        yield process
    finally:
        if process.usable:
            _idle.append(process)
        else:
            process.end()


def warm_up() -> None:
    """Start a process if there is none, so that it gets ready while the caller goes on."""
    with isolated():
        pass


@atexit.register
def _end_idle() -> None:
    """End what would otherwise notice by itself that this process is gone."""
    while _idle:
        _idle.pop().end()


def _library_file() -> str:
    """Return the file of onnx's C++ library."""
    package = find_spec("onnx")
    assert package is not None, "onnx is installed"
    assert package.origin is not None, "it is a package of files"
    found = sorted(Path(package.origin).parent.glob("onnx_cpp2py_export*.so"))
    assert found, "the library is part of the package"
    return str(found[0])
