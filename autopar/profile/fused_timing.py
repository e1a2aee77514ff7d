"""Fused groups timed on this machine, by ONNX Runtime or by the kernels of `torch.compile`.

On a CPU a group runs on one thread, and what counts is the processor time of that thread. Other processes change it,
too: they fill caches and use the bandwidth of memory. So a group is timed in several rounds over all groups, which lie
minutes apart, each with a session and memory of its own; the shortest call of all rounds counts. What half of the
rounds find beside the other half tells how far the measurement repeats itself. On a GPU, which torch.compile has Triton
kernels for, events of the stream are read; that has not been tried on hardware.
"""

import gzip
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from autopar.cost.fused_groups import FusedGroup
from autopar.errors import ClusterError, ExecutionError
from autopar.ir.graph import Attr
from autopar.profile.fused_draw import MODELS, SINGLE_SIZES, draw_groups, resized, sizes_of
from autopar.profile.timing import StreamClock
from autopar.ranks.assemble import Node, Port, assemble

if TYPE_CHECKING:
    from autopar.profile.fused_torch import Compiled

ORT, INDUCTOR = "onnxruntime", "inductor"
RUNTIMES = (ORT, INDUCTOR)
"""What runs groups: ONNX Runtime, op by op but for what it fuses itself, or the kernels of torch.compile."""
FILE = "fused_groups.jsonl"
OPSET = 24
ROUNDS = 6
"""Usual rounds over all groups."""
_WARMUP = 2
"""Calls before the first timed one of a round."""
_LEAST, _MOST = 5, 100
"""Timed calls of a round."""

Call = Callable[[], object]
"""Runs a group once."""


@dataclass(frozen=True, slots=True)
class TimedGroup:
    """A group with its measured seconds.

    Attributes:
        runtime: What ran it, one of `RUNTIMES`.
        machine: Name of the processor.
        version: Version of the runtime.
        group: The group.
        seconds: Shortest call of all rounds.
        first: Shortest call of the odd rounds.
        second: Shortest call of the even rounds.
        repeats: Calls of all rounds.
        rounds: Rounds over all groups.
    """

    runtime: str
    machine: str
    version: str
    group: FusedGroup
    seconds: float
    first: float
    second: float
    repeats: int
    rounds: int


@cache
def _numbers() -> Any:
    """Return drawn numbers between 0.1 and 1.1, from which inputs are cut."""
    return np.random.default_rng(0).random(1 << 22, np.float32) + np.float32(0.1)


def arrays_for(group: FusedGroup) -> list[Any]:
    """Return inputs of a group but for those that are known: numbers between 0.1 and 1.1, and ones."""
    found, place = [], 0
    for own in group.inputs:
        if own.data is not None:
            continue
        if own.dtype == "float32":
            count = prod(own.shape)
            found.append(np.resize(np.roll(_numbers()[: max(1, count) + 1], place), own.shape))
            place += 1
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


def _thread_times(call: Call, repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return found


@dataclass(slots=True)
class _Timing:
    """A group on its way through the rounds.

    Attributes:
        group: The group.
        prepare: Returns what runs it once, with memory of its own.
        best: Shortest call of each round.
        calls: Timed calls so far.
    """

    group: FusedGroup
    prepare: Callable[[], Call]
    best: list[float] = field(default_factory=list)
    calls: int = 0


def _time_in_rounds(
    timings: Sequence[_Timing],
    rounds: int,
    budget: float,
    times: Callable[[Call, int], list[float]],
    tell: Callable[[str], None],
) -> Iterator[list[_Timing]]:
    """Time groups round by round; yield those that the runtime takes after each round but the first.

    Args:
        timings: The groups.
        rounds: How often each of them has its turn.
        budget: Seconds for the timed calls of a turn.
        times: Returns the seconds of each of some calls.
        tell: Called with what a runtime does not take, and with rounds that are over.
    """
    left = list(timings)
    for number in range(rounds):
        taken = []
        for own in left:
            try:
                call = own.prepare()
            except ExecutionError as error:
                tell(f"left out {' '.join(op.kind for op in own.group.ops)}: {error.args[0]}")
                continue
            for _ in range(_WARMUP):
                call()
            probe = min(times(call, 2))
            found = times(call, max(_LEAST, min(_MOST, round(budget / max(probe, 1e-9)))))
            own.best.append(min(found))
            own.calls += len(found)
            taken.append(own)
        left = taken
        tell(f"round {number + 1} of {rounds}: {len(left)} groups")
        if number:
            yield left


def _timed(timings: Sequence[_Timing], runtime: str, machine: str, version: str) -> list[TimedGroup]:
    """Return groups with what the rounds so far have found."""
    found = []
    for own in timings:
        first, second = (min(own.best[start::2]) for start in (0, 1))
        seconds, rounds = min(first, second), len(own.best)
        found.append(TimedGroup(runtime, machine, version, own.group, seconds, first, second, own.calls, rounds))
    return found


def time_with_ort(
    groups: Sequence[FusedGroup],
    budget: float,
    machine: str,
    rounds: int = ROUNDS,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[list[TimedGroup]]:
    """Yield groups with their seconds in ONNX Runtime, those that it takes, after every round but the first.

    Args:
        groups: The groups.
        budget: Seconds for the timed calls of a group in a round.
        machine: Name of the processor.
        rounds: Rounds over all groups, two or more.
        tell: Called with what the runtime does not take, and with rounds that are over.
    """
    import onnxruntime

    timings = [_Timing(group, partial(_ort_call, group)) for group in groups]
    for taken in _time_in_rounds(timings, rounds, budget, _thread_times, tell):
        yield _timed(taken, ORT, machine, onnxruntime.__version__)


def time_with_inductor(
    structures: Sequence[Sequence[FusedGroup]],
    budget: float,
    machine: str,
    rounds: int = ROUNDS,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[list[TimedGroup]]:
    """Yield groups with their seconds in kernels of torch.compile, after every round but the first.

    Kernels are compiled once per structure.

    Args:
        structures: Groups of one structure each, in several numbers of samples, the largest first.
        budget: Seconds for the timed calls of a group in a round.
        machine: Name of the processor.
        rounds: Rounds over all groups, two or more.
        tell: Called with what torch does not take, and with rounds that are over.
    """
    import torch
    from torch._inductor import config

    from autopar.profile.fused_torch import Compiled

    config.compile_threads = 1
    torch._dynamo.reset()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        machine = torch.cuda.get_device_name()
    else:
        torch.set_num_threads(1)
    times = StreamClock().times if on_gpu else _thread_times

    def loaded(group: FusedGroup) -> list[Any]:
        return [torch.from_numpy(array).to("cuda" if on_gpu else "cpu") for array in arrays_for(group)]

    timings: list[_Timing] = []
    for number, sizes in enumerate(structures):
        fixed = any(_has_views(group) for group in sizes)
        largest = max((own.shape for own in sizes[0].inputs if own.shape), key=prod, default=(0,))
        try:
            kernels = Compiled(sizes[0], loaded(sizes[0]), 0 if fixed else largest[0])
        except ExecutionError as error:
            tell(f"left out {' '.join(op.kind for op in sizes[0].ops)}: {error.args[0]}")
            continue
        own = sizes[:1] if fixed else sizes
        timings += [_Timing(group, partial(_prepared, kernels, loaded, group)) for group in own]
        if (number + 1) % 100 == 0:
            tell(f"{number + 1} of {len(structures)} structures compiled")
    for taken in _time_in_rounds(timings, rounds, budget, times, tell):
        yield _timed(taken, INDUCTOR, machine, str(torch.__version__))


def _prepared(kernels: "Compiled", loaded: Callable[[FusedGroup], list[Any]], group: FusedGroup) -> Call:
    """Return what runs compiled kernels once, on inputs of their own."""
    return kernels.prepared(loaded(group))


def _has_views(group: FusedGroup) -> bool:
    shapes = [own.shape for own in group.inputs]
    for op in group.ops:
        if any(read.value >= 0 and shapes[read.value] != read.shape for read in op.reads):
            return True
        shapes += [made.shape for made in op.made]
    return False


def time_drawn(
    runtime: str,
    structures: int,
    sizes: int,
    seed: int,
    budget: float,
    machine: str,
    rounds: int,
    tell: Callable[[str], None],
) -> Iterator[list[TimedGroup]]:
    """Yield random groups of the zoo with their seconds, all of them after every round but the first.

    Args:
        runtime: What runs them, one of `RUNTIMES`.
        structures: How many structures are drawn.
        sizes: Sizes of each; those of one op have `SINGLE_SIZES` at least.
        seed: Of what is drawn.
        budget: Seconds for the timed calls of a group in a round.
        machine: Name of the processor.
        rounds: Rounds over all groups, two or more.
        tell: Called with what a runtime does not take, and with rounds that are over.
    """
    draw = random.Random(seed)
    drawn = []
    for group in draw_groups(MODELS, structures, seed):
        count = max(sizes, SINGLE_SIZES) if len(group.ops) == 1 else sizes
        wanted = [own for size in sizes_of(draw, count) if (own := resized(group, size)) is not None]
        # The first one is compiled for, and a dim of one sample would be taken for a constant.
        drawn.append(sorted(wanted, key=lambda own: -own.elements))
    drawn = [own for own in drawn if own]
    if runtime == ORT:
        yield from time_with_ort([own for each in drawn for own in each], budget, machine, rounds, tell)
    else:
        yield from time_with_inductor(drawn, budget, machine, rounds, tell)


def load_timed(path: Path) -> list[TimedGroup]:
    """Return the timed groups of a file, or of a folder with one.

    Raises:
        ClusterError: If it cannot be read.
    """
    path = path / FILE if path.is_dir() else path
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
        return [msgspec.json.decode(line, type=TimedGroup) for line in lines if line.strip()]
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise ClusterError(
            f"{path} has no timed groups: {error}", hint="autopar profile --fusion -o DIR writes them"
        ) from error
