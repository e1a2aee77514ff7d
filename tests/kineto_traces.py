"""Traces as the PyTorch profiler exports them, made from simulated timelines."""

import re
from collections.abc import Mapping
from typing import Any

from autopar.simulate import Row, Timeline
from autopar.simulate.timeline import Event

_KERNELS = {"all_reduce": "AllReduce_Sum_bf16_RING_LL", "all_gather": "AllGather_RING_LL",
            "reduce_scatter": "ReduceScatter_Sum_bf16_RING_LL"}  # fmt: skip
FORWARD_THREAD, BACKWARD_THREAD = 100, 101


def kineto(
    timeline: Timeline,
    stage: int,
    sizes: Mapping[str, int],
    *,
    rank: int | None = 0,
    factors: Mapping[str, float] | None = None,
    steps: int = 1,
    group_sizes: bool = True,
) -> dict[str, Any]:
    """Return the trace of a device that did what was simulated, with the bars of some terms longer by a factor.

    What comes after a longer bar comes later. Passes of further microbatches do what those of the first one do.

    Args:
        timeline: Simulated with `trace=True`.
        stage: Its stage.
        sizes: Devices of every mesh axis.
        rank: The rank that it names.
        factors: By term: "forward", "backward", "optimizer", "send", or the name of a mesh axis.
        steps: Steps, each as the one simulated.
        group_sizes: Whether collectives say how large their group is.
    """
    bars = sorted(_unrolled(timeline, stage), key=lambda bar: bar[1])
    events: list[dict[str, Any]] = []
    number, begin = 0, 0.0
    for step in range(steps):
        late = 0.0
        for term, start, seconds, name in bars:
            longer = seconds * (factors or {}).get(term, 1.0)
            number += 1
            events.extend(_kernel(number, term, begin + start + late, longer, name, sizes, group_sizes))
            late += longer - seconds
        length = timeline.step_seconds + late
        events.append(
            {
                "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step + 7}", "pid": 1,
                "tid": FORWARD_THREAD, "ts": begin * 1e6, "dur": length * 1e6,
            }
        )  # fmt: skip
        begin += length
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 8}}
    return {"schemaVersion": 1, **info, "traceEvents": events}


def _unrolled(timeline: Timeline, stage: int) -> list[tuple[str, float, float, str]]:
    own = [event for event in timeline.events if event.stage == stage]
    tasks = [event for event in own if event.row is Row.COMPUTE and event.depth == 0]
    found: list[tuple[str, float, float, str]] = []
    for event in own:
        if not event.seconds or (event.row is Row.COMPUTE and event.depth != 2):
            continue
        task = next((each for each in tasks if each.start <= event.start < each.start + each.seconds), None)
        inside = event.row in (Row.COMPUTE, Row.COLLECTIVES) and task is not None
        twins = [each for each in tasks if inside and task and each.name[0] == task.name[0]]
        term = _term(event, task if inside else None)
        starts = [each.start + event.start - task.start for each in twins if task] or [event.start]
        found.extend((term, start, event.seconds, event.name) for start in starts)
    return found


def _term(event: Event, task: Event | None) -> str:
    if event.row in (Row.SEND_NEXT, Row.SEND_PREVIOUS):
        return "send"
    axis = re.search(r"\[(\w+)\]", event.name)
    if axis and event.row is not Row.COMPUTE:
        return axis[1]
    return "optimizer" if task is None else {"F": "forward", "B": "backward"}[task.name[0]]


def _kernel(
    number: int, term: str, start: float, seconds: float, name: str, sizes: Mapping[str, int], group_sizes: bool
) -> list[dict[str, Any]]:
    thread = BACKWARD_THREAD if term == "backward" else FORWARD_THREAD
    launch = {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": thread, "ts": start * 1e6,
        "dur": 1.0, "args": {"correlation": number},
    }  # fmt: skip
    host = {"ph": "X", "pid": 1, "tid": thread, "ts": start * 1e6 - 1, "dur": 3.0}
    around = {
        "backward": {**host, "cat": "cpu_op", "name": "autograd::engine::evaluate_function: AddmmBackward0"},
        "optimizer": {**host, "cat": "user_annotation", "name": "Optimizer.step#AdamW.step"},
    }
    kind = name.partition("[")[0]
    shown = {"send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"}.get(
        term, "ampere_bf16_s16816gemm_128x64"
    )
    args: dict[str, Any] = {"correlation": number, "device": 0, "stream": 7}
    if term in sizes:
        shown = f"ncclDevKernel_{_KERNELS[kind]}(ncclDevKernelArgsStorage<4096ul>)"
        if group_sizes:
            args |= {"Collective name": kind.replace("_", ""), "Group size": sizes[term]}
    kernel = {
        "ph": "X", "cat": "kernel", "name": shown, "pid": 0, "tid": 7, "ts": start * 1e6, "dur": seconds * 1e6,
        "args": args,
    }  # fmt: skip
    return [*([around[term]] if term in around else []), launch, kernel]
