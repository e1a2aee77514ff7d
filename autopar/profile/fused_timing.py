"""Fused groups timed on this machine, by ONNX Runtime or by the kernels of `torch.compile`.

On a CPU a group runs on one thread, and what counts is the processor time of that thread, which other processes disturb
less than the time of the wall: a lower quartile of many short calls, in two rounds whose difference tells the noise. On
a GPU, which torch.compile has Triton kernels for, events of the stream are read; that has not been tried on hardware.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import quantiles
from typing import Any, cast

import msgspec
import numpy as np

from autopar.cost.fused_groups import FusedGroup
from autopar.errors import ClusterError, ExecutionError
from autopar.ir.graph import Attr
from autopar.profile.fused_draw import MODELS, draw_groups, resized, sizes_of
from autopar.profile.timing import StreamClock
from autopar.ranks.assemble import Node, Port, assemble

ORT, INDUCTOR = "onnxruntime", "inductor"
RUNTIMES = (ORT, INDUCTOR)
"""What runs groups: ONNX Runtime, op by op but for what it fuses itself, or the kernels of torch.compile."""
FILE = "fused_groups.jsonl"
OPSET = 24
_LEAST, _MOST = 4, 30
"""Timed calls of a round."""


@dataclass(frozen=True, slots=True)
class TimedGroup:
    """A group with its measured seconds.

    Attributes:
        runtime: What ran it, one of `RUNTIMES`.
        machine: Name of the processor.
        version: Version of the runtime.
        group: The group.
        seconds: Lower quartile of both rounds.
        first: That of the first round.
        second: That of the second round.
        repeats: Calls of a round.
    """

    runtime: str
    machine: str
    version: str
    group: FusedGroup
    seconds: float
    first: float
    second: float
    repeats: int


def arrays_for(group: FusedGroup) -> list[Any]:
    """Return drawn inputs of a group but for those that are known: numbers between 0.1 and 1.1, and ones."""
    draw = np.random.default_rng(0)
    found = []
    for own in group.inputs:
        if own.data is not None:
            continue
        if own.dtype == "float32":
            found.append(np.asarray(draw.random(own.shape, np.float32) + np.float32(0.1)))
        else:
            found.append(np.ones(own.shape, own.dtype))
    return found


def model_of(group: FusedGroup) -> bytes:
    """Return a group as an ONNX model of one segment."""
    names = [f"i{number}" for number in range(len(group.inputs))]
    ports = [
        Port(name, own.shape, own.dtype) for name, own in zip(names, group.inputs, strict=True) if own.data is None
    ]
    shapes: list[tuple[int, ...]] = [own.shape for own in group.inputs]
    constants = {
        name: np.array(own.data, own.dtype).reshape(own.shape)
        for name, own in zip(names, group.inputs, strict=True)
        if own.data is not None
    }
    nodes, outputs = [], []
    for place, op in enumerate(group.ops):
        reads = []
        for slot, read in enumerate(op.reads):
            if read.value < 0:
                reads.append("")
                continue
            name = names[read.value]
            if shapes[read.value] != read.shape:
                view = f"v{place}.{slot}"
                constants[f"{view}.shape"] = np.array(read.shape, np.int64)
                nodes.append(Node("Reshape", (), (name, f"{view}.shape"), (view,)))
                name = view
            reads.append(name)
        made = []
        for own in op.made:
            name = f"o{len(names)}"
            names.append(name)
            shapes.append(own.shape)
            made.append(name)
            if own.written:
                outputs.append(Port(name, own.shape, own.dtype))
        attrs = cast(tuple[tuple[str, Attr], ...], op.attrs)  # lists of one type each, as they were in the graph
        nodes.append(Node(op.kind, attrs, tuple(reads), tuple(made)))
    return assemble(nodes, ports, outputs, constants, OPSET)


def _ort_call(group: FusedGroup) -> Callable[[], object]:
    """Return what runs a group once in ONNX Runtime, into memory that is there.

    Raises:
        ExecutionError: If the runtime does not take it.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model_of(group), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's errors share no class below this one
        raise ExecutionError(f"ONNX Runtime does not take the group: {str(error)[:300]}") from error
    binding = session.io_binding()
    fed = {f"i{number}": own for number, own in enumerate(group.inputs) if own.data is None}
    taken = {item.name for item in session.get_inputs()}
    for name, array in zip(fed, arrays_for(group), strict=True):
        if name in taken:
            binding.bind_cpu_input(name, array)
    for item in session.get_outputs():
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(item.shape, np.float32, "cpu")
        binding.bind_ortvalue_output(item.name, value)
    return lambda: session.run_with_iobinding(binding)


def _thread_times(call: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return found


def _timed(call: Callable[[], object], budget: float, times: Callable[..., list[float]]) -> tuple[float, ...]:
    """Return the lower quartile of all calls, those of both rounds, and the calls of a round."""
    call()
    probe = min(times(call, 2))
    repeats = max(_LEAST, min(_MOST, round(budget / 2 / max(probe, 1e-9))))
    rounds = [times(call, repeats) for _ in range(2)]
    lower = [quantiles(own, n=4)[0] for own in (rounds[0] + rounds[1], *rounds)]
    return (*lower, repeats)


def time_with_ort(groups: Sequence[FusedGroup], budget: float, machine: str) -> Iterator[TimedGroup]:
    """Yield groups with their seconds in ONNX Runtime.

    Args:
        groups: The groups.
        budget: Seconds for the timed calls of a group.
        machine: Name of the processor.

    Raises:
        ExecutionError: If the runtime does not take one.
    """
    import onnxruntime

    for group in groups:
        seconds, first, second, repeats = _timed(_ort_call(group), budget, _thread_times)
        yield TimedGroup(ORT, machine, onnxruntime.__version__, group, seconds, first, second, int(repeats))


def time_with_inductor(sizes: Sequence[FusedGroup], batch: int, budget: float, machine: str) -> Iterator[TimedGroup]:
    """Yield groups of one structure with their seconds in kernels of torch.compile, which are compiled once.

    Args:
        sizes: The groups: one structure, in several numbers of samples.
        batch: First dim of those inputs of the first group that have samples.
        budget: Seconds for the timed calls of a group.
        machine: Name of the processor.

    Raises:
        ExecutionError: If torch does not take them.
    """
    import torch
    from torch._inductor import config

    from autopar.profile.fused_torch import Compiled

    config.compile_threads = 1
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        machine = torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
    times = StreamClock().times if on_gpu else _thread_times

    def loaded(group: FusedGroup) -> list[Any]:
        return [torch.from_numpy(array).to("cuda" if on_gpu else "cpu") for array in arrays_for(group)]

    fixed = any(_has_views(group) for group in sizes)
    kernels = Compiled(sizes[0], loaded(sizes[0]), 0 if fixed else batch)
    for group in sizes[:1] if fixed else sizes:
        seconds, first, second, repeats = _timed(kernels.prepared(loaded(group)), budget, times)
        yield TimedGroup(INDUCTOR, machine, str(torch.__version__), group, seconds, first, second, int(repeats))


def _has_views(group: FusedGroup) -> bool:
    shapes = [own.shape for own in group.inputs]
    for op in group.ops:
        if any(read.value >= 0 and shapes[read.value] != read.shape for read in op.reads):
            return True
        shapes += [made.shape for made in op.made]
    return False


def time_drawn(
    runtime: str, structures: int, sizes: int, seed: int, budget: float, machine: str, tell: Callable[[str], None]
) -> Iterator[TimedGroup]:
    """Yield random groups of the zoo with their seconds.

    Args:
        runtime: What runs them, one of `RUNTIMES`.
        structures: How many structures are drawn.
        sizes: Sizes of each.
        seed: Of what is drawn.
        budget: Seconds for the timed calls of a group.
        machine: Name of the processor.
        tell: Called with what a runtime does not take.
    """
    draw = random.Random(seed)
    for group in draw_groups(MODELS, structures, seed):
        wanted = [own for size in sizes_of(draw, sizes) if (own := resized(group, size)) is not None]
        if not wanted:
            continue
        # The first one is compiled for, and a dim of one sample would be taken for a constant.
        wanted.sort(key=lambda own: -own.elements)
        largest = max((own.shape for own in wanted[0].inputs if own.shape), key=prod, default=(0,))
        try:
            if runtime == ORT:
                yield from time_with_ort(wanted, budget, machine)
            else:
                yield from time_with_inductor(wanted, largest[0], budget, machine)
        except ExecutionError as error:
            tell(f"left out {' '.join(op.kind for op in group.ops)}: {error.args[0]}")


def load_timed(path: Path) -> list[TimedGroup]:
    """Return the timed groups of a file, or of a folder with one.

    Raises:
        ClusterError: If it cannot be read.
    """
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=TimedGroup) for line in lines if line.strip()]
    except (OSError, msgspec.DecodeError) as error:
        raise ClusterError(
            f"{path} has no timed groups: {error}", hint="autopar profile --fusion -o DIR writes them"
        ) from error
