"""Ops that ranks run together in a ring (`autopar.ir.rings`): a compiled step, and the blocks that go round.

The passed inputs of the next step travel while a step runs. What is carried along with them follows once the step has
added its term, and one time more after the last step, which brings it home: to the next rank, whose own it is after a
whole round, or back by as many ranks as it has come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.rings import RINGS
from autopar.program.records import Compute, Operand
from autopar.ranks.assemble import Node, Port, assemble
from autopar.ranks.communicator import Communicator, Group, Handle, Memory, Tensor
from autopar.ranks.compiled_models import Compiled, Engine


@dataclass(frozen=True, slots=True, eq=False)
class RingModel:
    """An op that ranks run in a ring.

    Attributes:
        instruction: The op on local blocks.
        passes: The step of each way round as a serialised model, with what it reads and returns.
    """

    instruction: Compute
    passes: tuple[tuple[bytes, tuple[Port, ...], tuple[Port, ...]], ...]

    def compile(self, engine: Engine) -> "CompiledRing":
        """Return the op ready to run.

        Raises:
            ExecutionError: If the runtime does not take a model.
        """
        return CompiledRing(self.instruction, tuple(engine.compile(*each) for each in self.passes))


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRing:
    """An op that ranks run in a ring, each way round compiled."""

    instruction: Compute
    passes: tuple[Compiled, ...]


def ring_model(instruction: Compute, dtypes: Sequence[str], opset: int) -> RingModel:
    """Return the models of an op that ranks run in a ring.

    Args:
        instruction: The op on local blocks.
        dtypes: Element types of its inputs; what is carried has that of the first one.
        opset: Version of the default ONNX domain.
    """
    ring, shapes = RINGS[instruction.op.kind], [operand.shape for operand in _inputs(instruction)]
    passes = []
    before: list[tuple[int, ...]] = []
    for each in ring.passes:
        carried = [item.shape(shapes) for item in each.carried]
        given = [*zip(shapes[: each.reads], dtypes, strict=False), *((shape, dtypes[0]) for shape in before + carried)]
        inputs = [Port(f"i{index}", shape, dtype) for index, (shape, dtype) in enumerate(given)]
        inputs += [Port(name, (), "int64") for name in ("start", "block_start")]
        outputs = [Port(f"o{index}", shape, dtypes[0]) for index, shape in enumerate(carried)]
        node = Node(
            each.kind, instruction.op.attrs, tuple(port.name for port in inputs), tuple(port.name for port in outputs)
        )
        passes.append((assemble([node], inputs, outputs, {}, opset), tuple(inputs), tuple(outputs)))
        before = carried
    return RingModel(instruction, tuple(passes))


def run_ring(
    compiled: CompiledRing,
    values: dict[str, Tensor],
    group: Group,
    communicator: Communicator,
    memory: Memory,
    engine: Engine,
) -> dict[str, Tensor]:
    """Run an op together with the other ranks of a group.

    Args:
        compiled: The op.
        values: What the segment has computed so far, by name.
        group: The ranks of the ring, in order.
        communicator: Reaches them.
        memory: Where tensors live.
        engine: Runs a step.

    Returns:
        The outputs of the op, by name.
    """
    instruction, ring = compiled.instruction, RINGS[compiled.instruction.op.kind]
    assert instruction.start is not None, "a ring is told where blocks start"
    inputs = [values[operand.value] for operand in _inputs(instruction)]
    own, size, steps = group.index(communicator.rank), len(group), instruction.ring_steps
    starts = [memory.load(np.array(rank * instruction.start.rows, np.int64)) for rank in range(size)]
    carried: list[Tensor] = []
    for each, model in zip(ring.passes, compiled.passes, strict=True):
        before, current = carried, list(inputs)
        shapes = [tuple(tensor.shape) for tensor in inputs]
        carried = [memory.filled(inputs[0], item.shape(shapes), item.initial) for item in each.carried]
        for step in range(steps):
            block, is_last = (own - step) % size, step == steps - 1
            passed = [] if is_last else [current[index] for index in ring.passed]
            arriving = _pass_on(passed, 1, own, group, communicator, memory)
            given = {f"i{index}": tensor for index, tensor in enumerate((*current[: each.reads], *before, *carried))}
            made = engine.run(model, {**given, "start": starts[own], "block_start": starts[block]})
            carried = [made[port.name] for port in model.outputs]
            for index, tensor in zip(ring.passed, arriving.wait(), strict=False):
                current[index] = tensor
            travelling = [slot for slot, item in enumerate(each.carried) if item.travels]
            ranks = 1 - steps if is_last else 1
            arrived = _pass_on([carried[slot] for slot in travelling], ranks, own, group, communicator, memory).wait()
            for slot, tensor in zip(travelling, arrived, strict=True):
                carried[slot] = tensor
    results = zip(instruction.outputs, carried[: ring.results], strict=True)
    return {operand.value: tensor for operand, tensor in results if operand is not None}


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Tensors on their way from the previous rank."""

    handle: Handle | None
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Return them once they are there."""
        if self.handle is not None:
            self.handle.wait()
        return self.tensors


def _pass_on(
    tensors: Sequence[Tensor], ranks: int, own: int, group: Group, communicator: Communicator, memory: Memory
) -> _Arriving:
    """Send tensors on by some ranks of a ring, and receive those that come from as far on the other side."""
    if not tensors or ranks % len(group) == 0:
        return _Arriving(None, tuple(tensors))
    arriving = tuple(memory.blank(tensor, tuple(tensor.shape)) for tensor in tensors)
    following, previous = group[(own + ranks) % len(group)], group[(own - ranks) % len(group)]
    sends = [(memory.contiguous(tensor), following) for tensor in tensors]
    return _Arriving(communicator.swap(sends, [(tensor, previous) for tensor in arriving], group), arriving)


def _inputs(instruction: Compute) -> list[Operand]:
    return [operand for operand in instruction.inputs if operand is not None]
