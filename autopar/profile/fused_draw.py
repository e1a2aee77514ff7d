"""Fused groups drawn from the training steps of the zoo, to be timed.

A group grows from a random op along producers and readers, as the search for kernels grows it. Some of its element-wise
ops become others of the zoo with as many inputs, and more of them follow, so that there are more groups than the zoo
has. Batch and sequence get sizes of their own in every group.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, prod

from autopar.cost.fused_groups import FusedGroup, GroupOp, GroupTensor, Made, Read, Shape, group_of
from autopar.cost.fusion import POINTWISE, ROWWISE, Kernel, Work
from autopar.ir.graph import Graph, Op, Phase
from autopar.workload import open_workload

MODELS = (
    "gpt2", "bert-base", "bert-large", "vit-b16", "llama2-7b", "gemma2-9b", "resnet50", "t5-11b", "mixtral-8x7b",
    "deepseek-v2-lite", "mamba-2.8b",
)  # fmt: skip
"""Models of the zoo whose groups are drawn; those that are not there are an error of the command."""

SAMPLES = 3
"""Samples of a microbatch in the graphs that groups are drawn from; what tells the dim of samples from others."""
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 14, 1 << 21
"""Range of the elements of the largest tensor of a group."""
MOST_OPS = 10
SINGLE = 0.15
"""Share of draws that are one op: what each kind of op takes by itself."""
SINGLE_SIZES = 6
"""Sizes of a structure of one op; there are few of these."""
CHANGED = 0.3
"""Share of element-wise ops that become another kind."""
REDUCED = 0.05
"""Share of added ops that are a softmax, in groups that reduce nothing yet."""
LENGTHS = (16, 32, 64, 128, 197, 256, 512, 1024)
"""Sequence lengths of groups; the longest that leaves a sample `MOST_PER_SAMPLE` elements, or one drawn below it."""
LEAST_PER_SAMPLE, MOST_PER_SAMPLE = 1 << 10, 1 << 18

UNARY = (
    "Abs", "Erf", "Exp", "Gelu", "Neg", "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Swish", "Tanh", "Cos", "Sin", "Log",
    "Softplus",
)  # fmt: skip
BINARY = ("Add", "Mul", "Sub", "Div", "Max", "Min")
GRADIENTS = (
    "autopar::GeluGrad", "autopar::GeluTanhGrad", "autopar::ReluGrad", "autopar::SigmoidGrad", "autopar::TanhGrad",
)  # fmt: skip
"""Gradients of activations: of x or y, and of dy."""
SOFTMAX = ("Softmax", "LogSoftmax")


@dataclass(frozen=True, slots=True)
class Pool:
    """Where groups of a phase of a model grow.

    Attributes:
        work: Its ops.
        typed: Its values.
        near: By name of an op the ops it may share a kernel with.
    """

    work: Work
    typed: Mapping[str, GroupTensor]
    near: Mapping[str, Sequence[str]]


def pools(model: str) -> Iterator[Pool]:
    """Yield the phases of a training step of a model of the zoo, one block of each kind."""
    folded = open_workload(f"zoo:{model}").folded(SAMPLES)
    graph = folded.graph
    typed = _typed(graph)
    ranks = {name: len(own.shape) for name, own in typed.items()}
    for kind in folded.kinds:
        for phases in ((Phase.FORWARD, Phase.LOSS), (Phase.BACKWARD,)):
            ops = [op for op in kind.ops if op.phase in phases]
            work = Work.of(ops, ranks, "chains")
            near = _neighbours(work, typed)
            if near:
                yield Pool(work, typed, near)


def _typed(graph: Graph) -> dict[str, GroupTensor]:
    found = {}
    for name, value in graph.values.items():
        known = graph.constants.get(name)
        data = None if known is None or known.size > 8 else tuple(known.reshape(-1).tolist())
        found[name] = GroupTensor(value.shape, value.dtype, data)
    return found


def _is_usable(op: Op, typed: Mapping[str, GroupTensor]) -> bool:
    floats = [typed[name] for name in op.outputs if name]
    return (op.kind in POINTWISE or op.kind in ROWWISE) and all(own.dtype == "float32" for own in floats)


def _neighbours(work: Work, typed: Mapping[str, GroupTensor]) -> dict[str, list[str]]:
    makers = {out: op.name for op in work.kernels for out in op.outputs if out}
    usable = {op.name for op in work.kernels if _is_usable(op, typed)}
    near: dict[str, dict[str, None]] = {name: {} for name in usable}
    for value, readers in work.readers.items():
        names = [work.kernels[number].name for number in readers]
        met = [name for name in (makers.get(value), *names) if name in usable]
        for first in met:
            near[first] |= {second: None for second in met if second != first}
    return {name: list(others) for name, others in near.items()}


def draw_groups(models: Sequence[str], count: int, seed: int) -> Iterator[FusedGroup]:
    """Yield random fused groups, no two of one structure, in sizes of the zoo; some are one op.

    Args:
        models: Models of the zoo they are drawn from.
        count: How many.
        seed: Of what is drawn.
    """
    draw = random.Random(seed)
    found = [pool for model in models for pool in pools(model)]
    seen = set()
    for _ in range(count * 200):
        pool = draw.choice(found)
        is_single = draw.random() < SINGLE
        kernel = _grown(pool, draw, 1 if is_single else draw.randint(1, MOST_OPS))
        group = group_of(kernel, pool.work, pool.typed)
        if group is None or not _is_whole(group):
            continue
        group = _changed(_shorter(group, draw), draw)
        if not is_single:
            group = _extended(group, draw)
        if group.structure in seen or not LEAST_PER_SAMPLE <= group.elements // SAMPLES <= 4 * MOST_PER_SAMPLE:
            continue
        seen.add(group.structure)
        yield group
        if len(seen) == count:
            return


def _grown(pool: Pool, draw: random.Random, wanted: int) -> Kernel:
    """Return a kernel of so many neighbours; of fewer, where no more may share one."""
    chosen = {draw.choice(list(pool.near))}
    while len(chosen) < wanted:
        around = [name for own in chosen for name in pool.near[own] if name not in chosen]
        if sum(_kind(pool, name) in ROWWISE for name in chosen):
            around = [name for name in around if _kind(pool, name) not in ROWWISE]
        if not around:
            break
        chosen.add(draw.choice(sorted(around)))
    return Kernel(tuple(sorted(chosen, key=pool.work.numbers.__getitem__)))


def _kind(pool: Pool, name: str) -> str:
    return pool.work.kernels[pool.work.numbers[name]].kind


def _is_whole(group: FusedGroup) -> bool:
    """Whether views keep the elements of what they show, and nothing inside is read from outside in between."""
    shapes: list[tuple[int, ...]] = [own.shape for own in group.inputs]
    for op in group.ops:
        if any(read.value >= 0 and prod(shapes[read.value]) != prod(read.shape) for read in op.reads):
            return False
        shapes += [made.shape for made in op.made]
    return True


def _changed(group: FusedGroup, draw: random.Random) -> FusedGroup:
    """Return a group with other kinds of element-wise ops here and there."""
    ops = []
    for op in group.ops:
        table = next((own for own in (UNARY, BINARY, GRADIENTS) if op.kind in own), ())
        if len(op.made) == 1 and table and draw.random() < CHANGED:
            op = replace(op, kind=draw.choice(table), attrs=())
        ops.append(op)
    return FusedGroup(group.inputs, tuple(ops))


def _extended(group: FusedGroup, draw: random.Random) -> FusedGroup:
    """Return a group with element-wise ops added that read what it makes, an input of its own, or both."""
    inputs, ops = list(group.inputs), list(group.ops)
    largest = group.elements
    for _ in range(draw.randint(0, max(0, MOST_OPS - len(ops)))):
        made = [own for op in ops for own in op.made]
        places = [place for place, own in enumerate(made) if prod(own.shape) == largest]
        if not places:
            break
        place = draw.choice(places[-3:])
        shape, number = made[place].shape, len(inputs) + place
        table: tuple[str, ...] = draw.choice((UNARY, BINARY, BINARY, GRADIENTS))
        if len(shape) > 1 and draw.random() < REDUCED and not any(op.kind in ROWWISE for op in ops):
            table = SOFTMAX
        reads = [Read(number, shape)]
        if table in (BINARY, GRADIENTS):
            known = [index for index, own in enumerate(inputs) if own.shape == shape and own.dtype == "float32"]
            if draw.random() < 0.4 or not known:
                ops = [_moved(op, len(inputs)) for op in ops]
                known = [len(inputs)]
                other = draw.choice((shape, shape[-1:], ())) if table is BINARY else shape
                inputs.append(GroupTensor(other, "float32"))
                reads = [Read(number + 1, shape)]
            second = draw.choice(known)
            reads.append(Read(second, inputs[second].shape))
        if draw.random() < 0.7:
            ops = _unwritten(ops, place)
        attrs = (("axis", -1),) if table is SOFTMAX else ()
        ops.append(GroupOp(draw.choice(table), attrs, tuple(reads), (Made(shape, "float32", True),)))
    return FusedGroup(tuple(inputs), tuple(ops))


def _moved(op: GroupOp, start: int) -> GroupOp:
    """Return an op whose values from a number on have the next number."""
    reads = tuple(replace(read, value=read.value + (read.value >= start)) for read in op.reads)
    return replace(op, reads=reads)


def _unwritten(ops: Sequence[GroupOp], place: int) -> list[GroupOp]:
    """Return ops of which the value with a number among those that are made is not written."""
    found, number = [], 0
    for op in ops:
        made = tuple(replace(own, written=own.written and number + index != place) for index, own in enumerate(op.made))
        number += len(op.made)
        found.append(replace(op, made=made))
    return found


def _shorter(group: FusedGroup, draw: random.Random) -> FusedGroup:
    """Return a group with sequences of a drawn length, where it has sequences."""
    largest = max((read.shape for op in group.ops for read in op.reads), key=prod)
    if len(largest) < 3 or (len(largest) == 4 and largest[2] == largest[3] and largest[1] > 64):
        return group
    length = largest[-2]
    each = prod(largest) // SAMPLES
    square = 2 if largest[-1] == length else 1
    fitting = [to for to in LENGTHS if LEAST_PER_SAMPLE <= each * (to / length) ** square <= MOST_PER_SAMPLE]
    if not fitting:
        return group
    to = draw.choice(fitting)
    return _mapped(group, lambda shape: _of_length(shape, length, to))


def _of_length(shape: Shape, length: int, to: int) -> Shape:
    if len(shape) == 2 and shape[0] == SAMPLES * length:
        return (SAMPLES * to, *(to if size == length else size for size in shape[1:]))
    return tuple(to if size == length else size for size in shape)


def resized(group: FusedGroup, elements: int) -> FusedGroup | None:
    """Return a group whose largest tensor has about so many elements, by other dims of samples; None if none has."""
    samples = max(1, round(elements * SAMPLES / group.elements))
    found = _mapped(group, lambda shape: _of_samples(shape, samples))
    return found if _is_whole(found) else None


def _of_samples(shape: Shape, samples: int) -> Shape:
    if shape and shape[0] == SAMPLES:
        return (samples, *shape[1:])
    if len(shape) == 2 and shape[0] % SAMPLES == 0:
        return (shape[0] // SAMPLES * samples, *shape[1:])
    return shape


def _mapped(group: FusedGroup, change: Callable[[Shape], Shape]) -> FusedGroup:
    """Return a group with other shapes."""
    inputs = tuple(own if own.data is not None else replace(own, shape=change(own.shape)) for own in group.inputs)
    ops = tuple(
        replace(
            op,
            reads=tuple(replace(read, shape=change(read.shape)) if read.value >= 0 else read for read in op.reads),
            made=tuple(replace(made, shape=change(made.shape)) for made in op.made),
        )
        for op in group.ops
    )
    return FusedGroup(inputs, ops)


def sizes_of(draw: random.Random, count: int) -> list[int]:
    """Return numbers of elements between the least and the most, each in a part of its own of a logarithmic scale."""
    low, high = log(LEAST_ELEMENTS), log(MOST_ELEMENTS)
    width = (high - low) / count
    return [round(exp(low + (number + draw.random()) * width)) for number in range(count)]
