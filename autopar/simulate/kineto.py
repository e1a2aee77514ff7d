"""Measured traces: what the PyTorch profiler (Kineto) recorded of one rank, as bars of the simulator's terms.

A trace is JSON in the "Trace Event Format" of the Chromium project, as `torch.profiler` exports it, packed by gzip or
not. Kernels are told apart by their names and by what launched them: the launch has the kernel's correlation number,
and lies inside an op of the autograd engine (backward), inside a step of the optimizer, or outside both (forward).
Kernels of NCCL are collectives, with kind and size of the group where the trace has them. Times are in microseconds.
"""

import gzip
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from autopar.errors import DataError
from autopar.escaping import one_line
from autopar.reading import UnreadableError, parse_json

LARGEST = 2**31
"""Bytes of a trace, unpacked; one step of a large model has some hundred MB."""
_HINT = "give a trace that torch.profiler exported with ProfilerActivity.CUDA, .json or .json.gz"
_COLLECTIVE = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send_?recv|send|recv|reduce)", re.IGNORECASE
)
_STEP = re.compile(r"ProfilerStep#\d+")
_OPTIMIZER = re.compile(r"Optimizer\.step#|^optimizer\b", re.IGNORECASE)
_OPTIMIZER_KERNEL = re.compile(r"multi_tensor_apply|adam", re.IGNORECASE)
_BACKWARD = "autograd::engine::evaluate_function"
_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all",
    "sendrecv": "send", "recv": "send",
}  # fmt: skip


class Work(StrEnum):
    """What a bar of a device is about."""

    FORWARD = "forward kernels"
    BACKWARD = "backward kernels"
    OPTIMIZER = "optimizer kernels"
    COLLECTIVE = "collective"
    SEND = "sends between stages"
    TO_HOST = "copies to the host"
    FROM_HOST = "copies from the host"


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in which a device does something.

    Attributes:
        work: What it is about.
        name: Kernel, op or collective.
        start: Seconds from the start of the first step.
        seconds: Length.
        kind: Of a collective: `all_reduce`, ...; else empty.
        size: Devices of its group; 0 if that is unknown.
    """

    work: Work
    name: str
    start: float
    seconds: float
    kind: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Recording:
    """What one rank did in some steps.

    Attributes:
        rank: The rank; None if the trace does not say.
        steps: Number of steps.
        seconds: Length of all of them.
        bars: In order of time.
    """

    rank: int | None
    steps: int
    seconds: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class _Event:
    """A complete event of the file, in microseconds."""

    name: str
    category: str
    thread: tuple[Any, Any]
    start: float
    length: float
    args: Mapping[str, Any]


def read_trace(path: str | Path) -> Recording:
    """Read the trace of one rank.

    Steps are those that the profiler marked (`ProfilerStep#N`); without marks the trace is one step.

    Raises:
        DataError: If the file cannot be read, is no trace, or has no kernels of a GPU.
    """
    shown = one_line(repr(str(path)))
    tree = _parse(Path(path), shown)
    events = tree if isinstance(tree, list) else tree.get("traceEvents") if isinstance(tree, dict) else None
    if not isinstance(events, list):
        raise DataError(f"{shown} is no trace: it has no list of traceEvents", hint=_HINT)
    complete = [_event(event, shown) for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    found = [event for event in complete if event.category in ("kernel", "gpu_memcpy")]
    if not any(event.category == "kernel" for event in found):
        raise DataError(f"{shown} has no kernels of a GPU among its {len(complete)} events", hint=_HINT)
    marks = [event for event in complete if _STEP.fullmatch(event.name) and event.category != "gpu_user_annotation"]
    ends = [(event.start, event.start + event.length) for event in marks or found]
    begin, end = min(start for start, _ in ends), max(stop for _, stop in ends)
    phases = _Phases(complete)
    bars = [bar for event in found if begin <= event.start <= end and (bar := _bar(event, phases, begin)) is not None]
    if not bars:
        raise DataError(f"{shown} has no kernels of a GPU inside its {len(marks)} profiled steps", hint=_HINT)
    end = max(end, *(begin + (bar.start + bar.seconds) * 1e6 for bar in bars))
    return Recording(
        _rank(tree), max(1, len(marks)), (end - begin) / 1e6, tuple(sorted(bars, key=lambda bar: bar.start))
    )


def _parse(path: Path, shown: str) -> Any:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                content = file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        why = (
            error.strerror if isinstance(error, OSError) and error.strerror else "it is packed, and cut off or damaged"
        )
        raise DataError(f"cannot read the trace {shown}: {why}", hint=_HINT) from None
    if len(content) > LARGEST:
        raise DataError(f"the trace {shown} has more than {LARGEST} bytes", hint="profile fewer steps")
    try:
        return parse_json(content, foreign=True)
    except UnreadableError as error:
        raise DataError(f"{error.in_file(shown)}: it is no trace", hint=_HINT) from None


def _event(event: Mapping[str, Any], shown: str) -> _Event:
    start, length, args = event.get("ts"), event.get("dur", 0), event.get("args")
    name = str(event.get("name", ""))
    if not isinstance(start, int | float) or not isinstance(length, int | float) or length < 0:
        raise DataError(f"{shown}: event {one_line(name)!r} has no start and length in microseconds", hint=_HINT)
    thread = str(event.get("pid")), str(event.get("tid"))
    return _Event(
        name,
        str(event.get("cat", "")).lower(),
        thread,
        float(start),
        float(length),
        args if isinstance(args, dict) else {},
    )


def _rank(tree: Any) -> int | None:
    info = tree.get("distributedInfo") if isinstance(tree, dict) else None
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None


class _Phases:
    """Which launches of kernels belong to the backward or the optimizer, by thread."""

    def __init__(self, events: Sequence[_Event]) -> None:
        self._launches = {
            event.args["correlation"]: event
            for event in events
            if event.category in ("cuda_runtime", "cuda_driver") and isinstance(event.args.get("correlation"), int)
        }
        host = [event for event in events if event.category in ("cpu_op", "user_annotation")]
        self._backward = _spans(event for event in host if event.name.startswith(_BACKWARD))
        self._optimizer = _spans(event for event in host if _OPTIMIZER.search(event.name))

    def of(self, kernel: _Event) -> Work:
        """Return the phase of a kernel."""
        launch = self._launches.get(kernel.args.get("correlation"))
        if launch is None:
            return Work.OPTIMIZER if _OPTIMIZER_KERNEL.search(kernel.name) else Work.FORWARD
        if _lies_in(launch, self._optimizer):
            return Work.OPTIMIZER
        return Work.BACKWARD if _lies_in(launch, self._backward) else Work.FORWARD


_Spans = dict[tuple[Any, Any], tuple[list[float], list[float]]]


def _spans(events: Any) -> _Spans:
    """Return starts of events by thread, ascending, and how far the events up to each of them reach."""
    found: defaultdict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        found[event.thread].append((event.start, event.start + event.length))
    spans: _Spans = {}
    for thread, own in found.items():
        starts, reach, furthest = [], [], 0.0
        for start, end in sorted(own):
            furthest = max(furthest, end)
            starts.append(start)
            reach.append(furthest)
        spans[thread] = starts, reach
    return spans


def _lies_in(event: _Event, spans: _Spans) -> bool:
    starts, reach = spans.get(event.thread, ([], []))
    place = bisect_right(starts, event.start) - 1
    return place >= 0 and event.start < reach[place]


def _bar(event: _Event, phases: _Phases, begin: float) -> Bar | None:
    start, seconds = (event.start - begin) / 1e6, event.length / 1e6
    if event.category == "gpu_memcpy":
        name = event.name.lower()
        if "htod" in name or "dtoh" in name:
            return Bar(Work.FROM_HOST if "htod" in name else Work.TO_HOST, event.name, start, seconds)
        return Bar(phases.of(event), event.name, start, seconds) if "dtod" in name else None
    if "nccl" not in event.name.lower():
        return Bar(phases.of(event), event.name, start, seconds)
    told = str(event.args.get("Collective name", "")) or event.name
    match = _COLLECTIVE.search(told.replace("_", "")) or _COLLECTIVE.search(event.name)
    kind = match[1].lower().replace("_", "") if match else "other"
    kind = _NAMES.get(kind, kind)
    size = event.args.get("Group size")
    members = size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0
    work = Work.SEND if kind == "send" else Work.COLLECTIVE
    return Bar(work, event.name, start, seconds, "" if work is Work.SEND else kind, members)
