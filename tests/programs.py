"""Programs made by hand or at random, and costs that are exact numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.cluster import PRESETS, Cluster, Host
from autopar.cost import IDEAL, Fused, Kernel, Stack
from autopar.cost import Collective as CollectiveKind
from autopar.ir.graph import Op, Phase
from autopar.ir.routing import Routed
from autopar.program.offload import offload_saved
from autopar.program.records import (
    Category,
    Collective,
    Compute,
    Instruction,
    Operand,
    Program,
    Resident,
    Segment,
    SegmentPhase,
    Slice,
    StageProgram,
    Store,
    defines,
    reads,
)
from autopar.program.rerun_ops import run_again
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES
from autopar.sharding import Axis, Mesh, Partial, Replicate, Shard
from autopar.simulate.layout import Shapes

OP_PHASE = {
    SegmentPhase.FORWARD: Phase.FORWARD,
    SegmentPhase.BACKWARD: Phase.BACKWARD,
    SegmentPhase.WEIGHT: Phase.BACKWARD,
    SegmentPhase.REDUCE: Phase.UPDATE,
    SegmentPhase.UPDATE: Phase.UPDATE,
}


_CLUSTER = replace(PRESETS["a100"], host=Host("host", 1e3, 8, to_host=2.0, to_device=1.0, latency=0.0))


@dataclass(frozen=True, slots=True)
class ExactCosts:
    """An op takes its attribute `seconds` over `speed`, a collective one second per byte over `bandwidth`.

    A transfer between stages takes `latency` and nothing per byte. Nodes have 8 devices.
    """

    speed: float = 1.0
    bandwidth: float = 1.0
    latency: float = 0.0
    cluster: Cluster = _CLUSTER
    stack: Stack = IDEAL

    @property
    def learned(self) -> None:
        """None: formulas count."""
        return None

    def fuse(
        self, ops: Sequence[Op], ranks: Mapping[str, int], stated: Sequence[Kernel] | None = None, /
    ) -> Mapping[str, Fused]:
        """Return none: every op is a kernel of its own."""
        return {}

    def op_seconds(
        self,
        op: Op,
        inputs: Sequence[Shapes | None],
        outputs: Sequence[Shapes | None],
        sizes: Mapping[str, float],
        fused: Fused,
        /,
    ) -> NDArray[np.float64]:
        """Return the attribute."""
        seconds = op.attr("seconds")
        assert isinstance(seconds, float)
        return np.array([seconds / self.speed])

    def host_seconds(self, op: Op, rank: int, fused: Fused, /) -> float:
        """Return what the stack says of a kernel."""
        return self.stack["host_launch"]

    def collective_seconds(
        self, collective: CollectiveKind, nbytes: float, axis: Axis, routed: Routed | None = None, /
    ) -> float:
        """Return the bytes."""
        return nbytes / self.bandwidth

    def exchange_seconds(self, nbytes: float, axis: Axis, /) -> float:
        """Return the bytes."""
        return nbytes / self.bandwidth

    def send_seconds(self, nbytes: float, tier: int, /) -> float:
        """Return the latency."""
        return self.latency

    def on(self, devices: range, /) -> "ExactCosts":
        """Return the same costs: all devices are alike."""
        return self

    def overlapped(self) -> "ExactCosts":
        """Return the costs with the dispatch hidden."""
        return replace(self, stack=self.stack.overlapped())


def value(name: str, size: float = 0.0) -> Operand:
    """Return an operand of `size` bytes in 8 elements."""
    return Operand(name, (8,), float(size))


def work(
    reads: Sequence[Operand | None],
    makes: Sequence[Operand | None],
    seconds: float,
    phase: SegmentPhase = SegmentPhase.FORWARD,
    name: str = "",
) -> Compute:
    """Return an op that takes so many seconds, named after what it makes."""
    inputs = tuple("" if operand is None else operand.value for operand in reads)
    outputs = tuple("" if operand is None else operand.value for operand in makes)
    title = name or "make_" + "_".join(outputs)
    op = Op(title, "Work", inputs, outputs, (("seconds", float(seconds)),), OP_PHASE[phase], block=0)
    return Compute(op, tuple(reads), tuple(makes))


def view(operand: Operand, result: str, phase: SegmentPhase = SegmentPhase.FORWARD) -> Compute:
    """Return an op that shows a value in another form, in the same memory."""
    made = replace(operand, value=result)
    op = Op(f"view_{result}", "Reshape", (operand.value,), (result,), (("seconds", 0.0),), OP_PHASE[phase], block=0)
    return Compute(op, (operand,), (made,))


def all_reduce(axis: Axis, operand: Operand, result: str, *, seconds: float, overlaps: bool = False) -> Collective:
    """Return an all_reduce that takes so many seconds at a bandwidth of 1."""
    made = Operand(result, operand.shape, operand.bytes)
    return Collective(
        CollectiveKind.ALL_REDUCE, axis, Partial(), Replicate(), operand, made, float(seconds), overlaps=overlaps
    )


def equal_stages(
    num_stages: int,
    num_microbatches: int,
    schedule: str,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float = 1.0,
    activation: float = 1.0,
    blocks_per_stage: int = 1,
    recompute: Recompute = Recompute.NONE,
    num_chunks: int = 1,
) -> Program:
    """Return a pipeline of equal blocks on one device per group, without any communication inside stages.

    A block saves `activation` bytes and nothing else takes memory but 10 bytes of parameters per stage. With several
    chunks there are `num_stages` / `num_chunks` groups. A schedule that splits the backward has the passes `backward`
    and `weight`, which both read what was saved.
    """
    groups = SCHEDULES[schedule].groups(num_stages // num_chunks, num_chunks)
    trains = schedule != "forward-only"
    x, y, saved, dx, dy = value("x"), value("y"), value("saved", activation), value("dx"), value("dy")
    count = num_stages * blocks_per_stage
    segments = []
    for kind in range(min(count, 3)):  # 0 first, 1 middle, 2 last
        first, last = kind == 0, kind == 2 or (kind == 1 and count == 2) or count == 1
        segments.append(
            Segment(
                kind,
                SegmentPhase.FORWARD,
                inputs=() if first else (x,),
                external=(),
                instructions=(work(() if first else (x,), (y, saved), forward),),
                saved=(saved,) if trains else (),
                outputs=() if last else (y,),
            )
        )
        if trains:
            incoming = () if last else (dy,)
            segments.append(
                Segment(
                    kind,
                    SegmentPhase.BACKWARD,
                    inputs=incoming,
                    external=(),
                    instructions=(work((*incoming, saved), (dx,), backward, SegmentPhase.BACKWARD),),
                    outputs=() if first else (dx,),
                )
            )
            if SCHEDULES[schedule].splits:
                make = work((saved,), (value("dw"),), weight, SegmentPhase.WEIGHT)
                segments.append(Segment(kind, SegmentPhase.WEIGHT, (), (), (make,)))
    kinds = [0, *[1] * (count - 2), 2][:count] if count != 2 else [0, 1]
    stages = tuple(
        StageProgram(
            i,
            (groups[i], groups[i] + 1),
            Mesh.of(tp=1),
            tuple(kinds[i * blocks_per_stage : (i + 1) * blocks_per_stage]),
            (recompute,) * blocks_per_stage,
            (Resident(Category.PARAMETERS, 10.0),),
        )
        for i in range(num_stages)
    )
    return Program(stages, tuple(segments), schedule, num_microbatches)


def two_block_step(mesh: Mesh) -> Program:
    """Return a training step of two blocks and two microbatches on one stage with axes `dp` and `tp`.

    Seconds of block 0: forward 2 + 1 all_reduce over tp, backward 3 + 1 over tp, gradients 2 over dp, update 1.
    Seconds of block 1: forward 3, backward 4, gradients 5 over dp, update 1 + 1 all_gather over dp.
    """
    dp, tp = mesh.axes
    forward, backward, update = SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.UPDATE
    w, v, a, y, x = value("w", 2), value("v", 2), value("a", 4), value("y", 4), value("x", 4)
    part, dw, dx, da = Operand("v.part", (8,), 1.0), value("w.grad", 4), value("dx", 4), value("da", 4)
    loss, dv, g = value("loss"), value("v.grad", 4), value("g", 4)
    tp_forward = all_reduce(tp, a, "y", seconds=1)
    tp_backward = all_reduce(tp, da, "da.sum", seconds=1)
    reduce_w, reduce_v = all_reduce(dp, dw, "w.sum", seconds=2), all_reduce(dp, dv, "v.sum", seconds=5)
    whole = Operand("v.new", (8 * dp.size,), 2.0)
    gather = Collective(CollectiveKind.ALL_GATHER, dp, Shard(0), Replicate(), part, whole, bytes=1.0)
    segments = (
        Segment(0, forward, (), (w,), (work((w,), (a,), 2), tp_forward), saved=(a,), outputs=(y,)),
        Segment(1, forward, (x,), (v,), (work((x, v), (loss,), 3),), saved=(x,)),
        Segment(1, backward, (), (v, dv), (work((x, v, dv), (dx, value("v.acc", 4)), 4, backward),), outputs=(dx,)),
        Segment(0, backward, (g,), (dw,), (work((g, a, dw), (da, value("w.acc", 4)), 3, backward), tp_backward)),
        Segment(0, SegmentPhase.REDUCE, (), (dw,), (reduce_w,), stores=(Store(reduce_w.result, "w.sum"),)),
        Segment(1, SegmentPhase.REDUCE, (), (dv,), (reduce_v,), stores=(Store(reduce_v.result, "v.sum"),)),
        Segment(0, update, (), (w, reduce_w.result), (work((w, reduce_w.result), (value("w.new", 2),), 1, update),)),
        Segment(1, update, (), (v, reduce_v.result), (work((v, reduce_v.result), (part,), 1, update), gather)),
    )
    resident = (Resident(Category.PARAMETERS, 4.0), Resident(Category.GRADIENTS, 8.0))
    stage = StageProgram(0, (0, mesh.size), mesh, (0, 1), (Recompute.NONE,) * 2, resident)
    return Program((stage,), segments, "1f1b", 2)


_SECONDS = st.integers(0, 4).map(float)
_BYTES = st.integers(0, 9).map(float)


@st.composite
def _segments(draw: st.DrawFn, kind: int, mesh: Mesh, first: bool, last: bool, trains: bool) -> list[Segment]:
    """Draw the segments of one kind of block.

    Activations `x` and `e` cross from block to block, `e` untouched by most; `d` and `g` are their gradients.
    """
    dp, tp = mesh.axes
    size_x, size_e = 5.0, 3.0
    prefix = f"k{kind}."
    parameter = value(f"{prefix}w", 2)
    inputs = () if first else (value("x", size_x), value("e", size_e))
    known = list(inputs)
    instructions: list[Instruction] = []
    for i in range(draw(st.integers(1, 3))):
        reads = [operand for operand in known if draw(st.booleans())]
        made = [value(f"{prefix}a{i}", draw(_BYTES))]
        made_by = work([*reads, parameter, None], made, draw(_SECONDS))
        instructions.append(replace(made_by, kept=draw(_BYTES) if trains and draw(st.booleans()) else 0.0))
        known.extend(made)
        if draw(st.booleans()):
            seen = draw(st.sampled_from(known))
            instructions.append(view(seen, f"{prefix}v{i}"))
            known.append(value(f"{prefix}v{i}", seen.bytes))
        if draw(st.booleans()):
            reduced = all_reduce(tp, made[0], f"{prefix}r{i}", seconds=draw(_SECONDS))
            instructions.append(reduced)
            known.append(reduced.result)
    if first:
        whole = Operand("whole", (8 * tp.size,), size_e * tp.size)
        instructions.append(work(known, [whole], draw(_SECONDS)))
        instructions.append(Slice(tp, Shard(0), whole, value("e", size_e)))
        known.append(value("e", size_e))
    out = value(f"{prefix}y", size_x)
    instructions.append(work(known[-1:], [out, None], draw(_SECONDS)))
    candidates = [*known, out]
    saved = tuple(operand for operand in candidates if draw(st.booleans())) if trains else ()
    outputs = () if last else (out, value("e", size_e))
    segments = [Segment(kind, SegmentPhase.FORWARD, inputs, (parameter,), tuple(instructions), saved, outputs)]
    if not trains:
        return segments
    again = run_again(segments[0], {i.op.name for i in instructions if isinstance(i, Compute) and draw(st.booleans())})
    if again is not None:
        segments.append(again)
    segments.extend((offload_saved(segments[0]) if draw(st.booleans()) else None) or ())

    incoming = () if last else (value("d", size_x), value("g", size_e))
    total = value(f"{prefix}w.sum", 4)
    known = [*incoming, *saved]
    instructions = []
    for i in range(draw(st.integers(0, 2))):
        reads = [operand for operand in known if draw(st.booleans())]
        made = [value(f"{prefix}b{i}", draw(_BYTES))]
        instructions.append(work(reads, made, draw(_SECONDS), SegmentPhase.BACKWARD))
        known.extend(made)
    gradient = value(f"{prefix}dw", draw(_BYTES))
    instructions.append(work(known[:1], [gradient], draw(_SECONDS), SegmentPhase.BACKWARD))
    if draw(st.booleans()):
        axis = draw(st.sampled_from([dp, tp]))
        traffic = all_reduce(axis, gradient, f"{prefix}dw.r", seconds=draw(_SECONDS), overlaps=True)
        instructions.append(traffic)
        gradient = traffic.result
    old = value(f"{prefix}w.grad", 4)
    instructions.append(work([old, gradient], [total], draw(_SECONDS), SegmentPhase.BACKWARD))
    sent: tuple[Operand, ...] = ()
    if not first:
        sent = (value(f"{prefix}dx", size_x), value("g", size_e))
        makes = sent[:1] if incoming else sent
        instructions.append(work(known, makes, draw(_SECONDS), SegmentPhase.BACKWARD))
    segments.append(
        Segment(
            kind,
            SegmentPhase.BACKWARD,
            incoming,
            (old,),
            tuple(instructions),
            outputs=sent,
            stores=(Store(total, old.value),),
        )
    )
    summed = old
    if draw(st.booleans()):
        first_hop = all_reduce(draw(st.sampled_from([dp, tp])), old, f"{prefix}h", seconds=draw(_SECONDS))
        second_hop = all_reduce(dp, first_hop.result, f"{prefix}s", seconds=draw(_SECONDS))
        summed = second_hop.result
        segments.append(
            Segment(
                kind, SegmentPhase.REDUCE, (), (old,), (first_hop, second_hop), stores=(Store(summed, summed.value),)
            )
        )
    part = Operand(f"{prefix}p", (4,), 1.0)
    update = work([summed, parameter], [part], draw(_SECONDS), SegmentPhase.UPDATE)
    gathered = Operand(f"{prefix}w.new", (4 * dp.size,), 2.0)
    gather = Collective(
        CollectiveKind.ALL_GATHER, dp, Shard(0), Replicate(), part, gathered, bytes=float(draw(st.integers(0, 3)))
    )
    segments.append(
        Segment(
            kind,
            SegmentPhase.UPDATE,
            (),
            (summed, parameter),
            (update, gather),
            stores=(Store(gathered, parameter.value),),
        )
    )
    return segments


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a valid program: 1 to 3 stages of 1 to 3 blocks, on meshes inside a node or across nodes."""
    mesh = draw(st.sampled_from([Mesh.of(dp=1, tp=1), Mesh.of(dp=2, tp=2), Mesh.of(dp=8, tp=4)]))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-h2", "forward-only"]))
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    trains = schedule != "forward-only"
    count = sum(lengths)
    segments: list[Segment] = []
    if count == 1:
        kinds = [0]
        segments += draw(_segments(0, mesh, True, True, trains))
    else:
        middle = draw(st.lists(st.integers(2, 3), min_size=count - 2, max_size=count - 2))
        kinds = [0, *middle, 1]
        segments += draw(_segments(0, mesh, True, False, trains))
        segments += draw(_segments(1, mesh, False, True, trains))
        for kind in sorted(set(middle)):
            segments += draw(_segments(kind, mesh, False, False, trains))
    stages = []
    for index, length in enumerate(lengths):
        start = sum(lengths[:index])
        state = (Resident(Category.OPTIMIZER, 12.0),)
        hosted = trains and draw(st.booleans())
        stages.append(
            StageProgram(
                index,
                (index * mesh.size, (index + 1) * mesh.size),
                mesh,
                tuple(kinds[start : start + length]),
                tuple(draw(st.sampled_from(Recompute if trains else [Recompute.NONE])) for _ in range(length)),
                (Resident(Category.PARAMETERS, 7.0), *(() if hosted else state)),
                hosted=state if hosted else (),
            )
        )
    if SCHEDULES[schedule].splits:
        segments = [half for segment in segments for half in halves(segment)]
    return Program(tuple(stages), tuple(segments), schedule, draw(st.integers(1, 5)))


def halves(segment: Segment) -> tuple[Segment, ...]:
    """Return a backward in two parts, what its outputs need and the rest; any other segment as it is."""
    if segment.phase is not SegmentPhase.BACKWARD:
        return (segment,)
    wanted = {operand.value for operand in segment.outputs}
    first: list[Instruction] = []
    for instruction in reversed(segment.instructions):
        if not wanted.isdisjoint(operand.value for operand in defines(instruction)):
            first.insert(0, instruction)
            wanted.update(operand.value for operand in reads(instruction))
    rest = tuple(instruction for instruction in segment.instructions if instruction not in first)
    made = [*segment.inputs, *(operand for instruction in first for operand in defines(instruction))]
    read = {operand.value for instruction in rest for operand in reads(instruction)}
    saved = tuple(operand for operand in made if operand.value in read)
    backward = replace(segment, external=(), instructions=tuple(first), saved=saved, stores=())
    weight = replace(segment, phase=SegmentPhase.WEIGHT, inputs=(), instructions=rest, outputs=())
    return backward, weight
