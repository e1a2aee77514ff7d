"""ONNX Runtime: models compiled once, run on tensors where they are.

Inputs and outputs are bound by address, so nothing is copied between the runtime and the library that communicates,
neither on the host nor on a GPU.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import ExecutionError, JobError
from autopar.onnx.tensors import ELEM_TYPES
from autopar.ranks.assemble import Port
from autopar.ranks.communicator import Memory, Tensor

_FATAL = 4  # severity: errors come as exceptions, and once is enough


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A model ready to run.

    Attributes:
        session: The runtime's session.
        inputs: What it reads, those of its ports the runtime did not optimise away.
        outputs: What it returns.
    """

    session: Any
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


class Engine:
    """Compiles and runs models; equal models are compiled once.

    Args:
        memory: Where the tensors live.
        threads: Threads of a run on the CPU.
        stream: Address of the CUDA stream the communicating library works on, on which the runtime shall work, too.

    Raises:
        JobError: If the tensors live on a GPU and the installed runtime has no kernels for it.
    """

    def __init__(self, memory: Memory, threads: int = 1, stream: int | None = None) -> None:
        self._memory = memory
        self._threads = threads
        self._stream = stream
        self._known: dict[bytes, Compiled] = {}
        if memory.device == "cuda":
            import onnxruntime

            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise JobError(
                    f"the installed onnxruntime {onnxruntime.__version__} has no kernels for GPUs",
                    hint="pip install onnxruntime-gpu, or use --backend gloo",
                )

    @property
    def num_models(self) -> int:
        """Number of distinct models compiled so far."""
        return len(self._known)

    def clear(self) -> None:
        """Forget all models and give back the memory they work in."""
        self._known.clear()

    def compile(self, model: bytes, inputs: Sequence[Port], outputs: Sequence[Port]) -> Compiled:
        """Return a model ready to run.

        Raises:
            ExecutionError: If the runtime does not take it.
        """
        key = hashlib.sha256(model).digest()
        if key not in self._known:
            session = self._session(model)
            used = {item.name for item in session.get_inputs()}
            kept = tuple(port for port in inputs if port.name in used)
            self._known[key] = Compiled(session, kept, tuple(outputs))
        return self._known[key]

    def _session(self, model: bytes) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _FATAL
        try:
            return onnxruntime.InferenceSession(model, options, providers=self._providers())
        except _errors() as error:
            raise ExecutionError(
                f"ONNX Runtime {onnxruntime.__version__} cannot compile a part of the model: {error}",
                hint="export the model in float32, or with an older opset",
            ) from error

    def _providers(self) -> list[Any]:
        if self._memory.device == "cpu":
            return ["CPUExecutionProvider"]
        options = {"device_id": str(self._memory.index)}
        if self._stream is not None:
            options["user_compute_stream"] = str(self._stream)
        return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]

    def run(self, compiled: Compiled, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run a model.

        Args:
            compiled: The model.
            inputs: Tensors by name, those the model does not read included.

        Returns:
            New tensors by the names of its outputs.

        Raises:
            ExecutionError: If a kernel fails.
        """
        memory, session = self._memory, compiled.session
        binding = session.io_binding()
        for port in compiled.inputs:
            tensor = inputs[port.name]
            assert tuple(tensor.shape) == port.shape, f"{port} is fed with {tuple(tensor.shape)}"
            self._bind(binding.bind_input, port, tensor)
        outputs = {port.name: memory.empty(port.shape, port.dtype) for port in compiled.outputs}
        for port in compiled.outputs:
            self._bind(binding.bind_output, port, outputs[port.name])
        try:
            session.run_with_iobinding(binding)
        except _errors() as error:
            raise ExecutionError(f"ONNX Runtime failed in a part of the model: {error}") from error
        return outputs

    def _bind(self, bind: Any, port: Port, tensor: Tensor) -> None:
        memory = self._memory
        bind(port.name, memory.device, memory.index, ELEM_TYPES[port.dtype], port.shape, memory.pointer(tensor))


def _errors() -> tuple[type[Exception], ...]:
    """Return what the runtime raises."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException")
    return (RuntimeError, *(getattr(state, name) for name in (*names, "EPFail") if hasattr(state, name)))
