"""What is called to time an event: a model in ONNX Runtime, a transfer, or both at once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.cost.collectives import Collective as Kind
from autopar.errors import ExecutionError
from autopar.events import OverlapEvent, TransferEvent
from autopar.profile.timed_tasks import Feed, Work
from autopar.program.records import Collective, Operand
from autopar.ranks.assemble import Node, assemble
from autopar.ranks.assemble import Port as ModelPort
from autopar.ranks.collectives import Pending, begin
from autopar.ranks.communicator import Communicator, Group, Memory, Tensor
from autopar.ranks.compiled_models import Engine
from autopar.sharding import Axis, Partial, Placement, Replicate, Shard

_OPSET = 24
_ROWS = 8
"""Rows of a transferred tensor per member of the group."""
FLOAT32 = 4

Action = Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a rank works.

    Attributes:
        memory: Its tensors.
        engine: Its kernels.
        communicator: Reaches the other ranks; None if there are none.
        rank: Its number.
    """

    memory: Memory
    engine: Engine
    communicator: Communicator | None
    rank: int


def model_action(work: Work, place: Place) -> Action:
    """Return what runs a model once, on numbers drawn now.

    Raises:
        ExecutionError: If the runtime does not take the model or its inputs.
    """
    inputs = [ModelPort(feed.name, feed.shape, feed.dtype) for feed in work.inputs]
    outputs = [ModelPort(port.name, port.shape, port.dtype) for port in work.outputs]
    compiled = place.engine.compile(work.model, inputs, outputs)
    fed = {feed.name: _drawn(feed, place.memory, seed) for seed, feed in enumerate(work.inputs)}
    return lambda: place.engine.run(compiled, fed)


def _drawn(feed: Feed, memory: Memory, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    if "float" in feed.dtype:
        numbers = rng.standard_normal(feed.shape, np.float32) * 0.1
        if feed.dtype == "float32":
            return memory.load(np.asarray(numbers))
        tensor = memory.load(np.asarray(numbers))
        other = memory.empty(feed.shape, feed.dtype)
        other[...] = tensor
        return other
    if feed.dtype == "bool":
        return memory.load(np.ones(feed.shape, bool))
    drawn = np.ones(feed.shape) if feed.limit is None else rng.integers(0, feed.limit, feed.shape)
    return memory.load(np.asarray(drawn, feed.dtype))


def launch_work() -> Work:
    """Return a model that adds two numbers: what a call takes besides its kernels."""
    port = ModelPort("x", (1,), "float32")
    model = assemble([Node("Add", (), ("x", "x"), ("y",))], [port], [ModelPort("y", (1,), "float32")], {}, _OPSET)
    return _work_of(model, ["x"], (1,), "y", (1,))


def products_work(size: int, products: int) -> Work:
    """Return a model of square matrix products one after the other."""
    shape = (size, size)
    nodes = [Node("MatMul", (), (f"x{i}", "w"), (f"x{i + 1}",)) for i in range(products)]
    last = f"x{products}"
    ports = [ModelPort(name, shape, "float32") for name in ("x0", "w")]
    model = assemble(nodes, ports, [ModelPort(last, shape, "float32")], {}, _OPSET)
    return _work_of(model, ["x0", "w"], shape, last, shape)


def _work_of(model: bytes, names: list[str], shape: tuple[int, ...], out: str, out_shape: tuple[int, ...]) -> Work:
    from autopar.profile.timed_tasks import Port

    return Work(model, tuple(Feed(name, shape, "float32") for name in names), (Port(out, out_shape, "float32"),))


def transfer_action(event: TransferEvent, group: Group, place: Place) -> Action:
    """Return what makes a transfer once; every rank of the group calls it equally often.

    Raises:
        ExecutionError: If there is no such operation.
    """
    memory = place.memory
    if event.operation in ("offload", "fetch"):
        tensor = memory.load(np.zeros(max(1, round(event.bytes / FLOAT32)), np.float32))
        if event.operation == "offload":
            return lambda: memory.offload(tensor)
        held = memory.offload(tensor)
        return lambda: memory.back(held)
    communicator = place.communicator
    assert communicator is not None, "transfers need other ranks"
    if event.operation == "send":
        data = memory.load(np.zeros(max(1, round(event.bytes / FLOAT32)), np.float32))
        first, second = group
        if place.rank == first:
            return lambda: communicator.send(data, second).wait()
        return lambda: communicator.receive(data, first).wait()
    if event.operation not in set(Kind):
        raise ExecutionError(f"there is no operation {event.operation!r} to time")
    start = started(event, group, place)
    return lambda: start().wait()


def started(event: TransferEvent, group: Group, place: Place) -> Callable[[], Pending]:
    """Return what starts a collective."""
    communicator, memory, members = place.communicator, place.memory, len(group)
    assert communicator is not None, "collectives need other ranks"
    kind, dim = Kind(event.operation), int(event.inner)
    rows = _ROWS * members
    whole = [rows, members * max(1, -(-round(event.bytes / FLOAT32) // (rows * members)))]
    ends: dict[Kind, tuple[Placement, Placement]] = {
        Kind.ALL_REDUCE: (Partial(), Replicate()),
        Kind.ALL_GATHER: (Shard(dim), Replicate()),
        Kind.REDUCE_SCATTER: (Partial(), Shard(dim)),
        Kind.ALL_TO_ALL: (Shard(0), Shard(1)),
    }
    source, target = ends[kind]
    if kind is Kind.ALL_GATHER:
        whole[dim] //= members
    shape = (whole[0], whole[1])
    tensor = memory.load(np.zeros(shape, np.float32))
    operand = Operand("x", shape, event.bytes)
    axis = Axis("group", members, 1)
    collective = Collective(kind, axis, source, target, operand, Operand("y", shape, event.bytes), event.bytes)
    return lambda: begin(collective, tensor, group, communicator, memory)


def overlap_action(event: OverlapEvent, group: Group, place: Place) -> Action:
    """Return what computes while a transfer is under way, or either alone."""
    compute = model_action(products_work(event.size, event.products), place)
    start = started(TransferEvent(event.operation, event.bytes, event.members, event.members), group, place)

    def both() -> None:
        pending = start()
        compute()
        pending.wait()

    return {"both": both, "compute": compute, "transfer": lambda: start().wait()}[event.parts]
