"""The process that asks onnx's C++ library, and runs ops of unknown cost, for `autopar.onnx.isolated`.

It is started by its path and imports no package at first: the library is a single file, loaded in hundredths of a
second. A request is a pair (what, arguments), an answer a pair (whether it succeeded, result or message); both travel
as `marshal` data behind their length.
"""

import marshal
import os
import resource
import struct
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import IO, Any

LENGTH = struct.Struct("<Q")
"""The number of bytes of a message, ahead of it."""

_LIBRARY = "onnx.onnx_cpp2py_export"
"""Name of the library's module."""
_SECONDS_PER_BYTE = 1e-7
"""Processor time of a request for each of its bytes; for a whole model the library takes about a tenth of that."""
_BYTES, _BYTES_PER_BYTE = 1 << 30, 8
"""Memory of the process; a whole model is held several times."""

Packed = tuple[str, tuple[int, ...], bytes] | None
"""An array as dtype, shape and bytes; None for an absent one."""


def serve(library_file: str, seconds: float) -> None:
    """Answer requests on standard input until it is closed.

    Args:
        library_file: The file of onnx's C++ library.
        seconds: Processor time of a request, besides what its bytes are allowed.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # what a dying library prints helps nobody, and must not end up among the answers
        os.dup2(silence, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = _load(library_file)
    handlers: Mapping[str, Callable[..., Any]] = {
        "infer": lambda *given: _infer(library, *given),
        "inline": lambda model: library.inliner.inline_local_functions(model, False),
        "convert": library.version_converter.convert_version,
        "check": lambda model: library.checker.check_model(model, True, False, False),
        "run": _run,
    }
    while (request := receive(requests, lambda length: _limit(length, seconds))) is not None:
        what, arguments = request
        try:
            answer = True, handlers[what](*arguments)
        except Exception as error:  # whatever the library raises is the caller's to see
            starved = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
            answer = False, "it takes more memory than is allowed" if starved else str(error) or type(error).__name__
        send(answers, answer)


def send(stream: IO[bytes], message: Any) -> None:
    """Write a message."""
    data = marshal.dumps(message)
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes], prepare: Callable[[int], None] | None = None) -> Any:
    """Return the next message; None if the other side has closed the stream.

    Args:
        stream: Where to read.
        prepare: Called with the number of bytes of the message before it is read.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if prepare is not None:
        prepare(length)
    data = stream.read(length)
    return marshal.loads(data) if len(data) == length else None


def _limit(length: int, seconds: float) -> None:
    """Bound processor time and memory for a request: beyond, the process is ended or gets no memory."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    end = int(usage.ru_utime + usage.ru_stime + seconds + length * _SECONDS_PER_BYTE) + 1
    for kind, bound in ((resource.RLIMIT_CPU, end), (resource.RLIMIT_DATA, _BYTES + length * _BYTES_PER_BYTE)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))


def _load(library_file: str) -> Any:
    """Load the library by itself; the package, if it is imported later, finds it loaded."""
    loader = ExtensionFileLoader(_LIBRARY, library_file)
    spec = spec_from_file_location(_LIBRARY, library_file, loader=loader)
    assert spec is not None, "a loader is given"
    library = sys.modules[_LIBRARY] = module_from_spec(spec)
    loader.exec_module(library)
    return library


def _infer(
    library: Any,
    schema: tuple[str, int, str],
    node: bytes,
    types: Mapping[str, bytes],
    data: Mapping[str, bytes],
    opsets: Mapping[str, int],
    ir_version: int,
) -> Mapping[str, bytes]:
    """Infer the types of a node's outputs, see `onnx.shape_inference.infer_node_outputs`."""
    found: Mapping[str, bytes] = library.defs.get_schema(*schema)._infer_node_outputs(
        node, types, data, {}, opsets, ir_version
    )
    return found


_executors: list[Any] = []
"""The executor, once there is one; it keeps what it has built."""


def _run(path: list[str], kind: str, attrs: Any, inputs: tuple[Packed, ...], *rest: Any) -> tuple[Packed, ...]:
    """Run an op, see `autopar.execute.Executor.run_kind`."""
    sys.path[:] = path
    import numpy as np

    from autopar.execute import Executor
    from autopar.ir.text import numpy_dtype

    if not _executors:
        _executors.append(Executor())
    arrays = [
        None if packed is None else np.frombuffer(packed[2], numpy_dtype(packed[0])).reshape(packed[1])
        for packed in inputs
    ]
    results = _executors[0].run_kind(kind, attrs, arrays, *rest)
    return tuple((str(array.dtype), array.shape, array.tobytes()) for array in results)


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
