"""Graphs of one op, data for them, and the law that a strategy must keep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.discover import Rule, Strategy
from autopar.discover.rules import Halo, Local
from autopar.execute import Executor
from autopar.execute.rings import run_ring
from autopar.ir.graph import Attr, Graph, Op, Value
from autopar.ir.rings import RINGS
from autopar.sharding import Partial, Placement, Replicate, Shard

Array = NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """An input of a test op: floats, or with `high` integers below it, or booleans."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    high: int = 0
    positive: bool = False

    def draw(self, rng: np.random.Generator) -> Array:
        """Return random data."""
        if self.dtype == "bool":
            return rng.random(self.shape) < 0.7
        if self.dtype.startswith("int"):
            return rng.integers(0, self.high, self.shape).astype(self.dtype)
        return rng.uniform(0.1, 2, self.shape) if self.positive else rng.standard_normal(self.shape)


Input = Tensor | Array | None


def floats(*shape: int) -> Tensor:
    return Tensor(shape)


def positive(*shape: int) -> Tensor:
    return Tensor(shape, positive=True)


def indices(high: int, *shape: int) -> Tensor:
    return Tensor(shape, "int64", high)


def flags(*shape: int) -> Tensor:
    return Tensor(shape, "bool")


def ints(*content: int) -> Array:
    return np.array(content, dtype=np.int64)


def draw_all(inputs: Sequence[Input], seed: int) -> list[Array | None]:
    """Return data for all inputs; constants are what they are."""
    rng = np.random.default_rng(seed)
    return [item.draw(rng) if isinstance(item, Tensor) else item for item in inputs]


def single_op(
    kind: str, inputs: Sequence[Input], num_outputs: int = 1, opset: int = 24, /, **attrs: Attr
) -> tuple[Graph, Op]:
    """Return a graph that holds one op, and the op; arrays among the inputs become constants."""
    names = tuple("" if item is None else f"x{i}" for i, item in enumerate(inputs))
    op = Op("op", kind, names, tuple(f"y{i}" for i in range(num_outputs)), tuple(sorted(attrs.items())))
    results = Executor().run(op, draw_all(inputs, seed=0), opset)
    values = {
        name: Value(name, item.shape, item.dtype if isinstance(item, Tensor) else item.dtype.name)
        for name, item in zip(names, inputs, strict=True)
        if item is not None
    }
    values |= {name: Value(name, y.shape, y.dtype.name) for name, y in zip(op.outputs, results, strict=True)}
    graph = Graph(
        name=kind,
        opset=opset,
        values=values,
        inputs=tuple(name for name, item in zip(names, inputs, strict=True) if isinstance(item, Tensor)),
        states=(),
        constants={name: item for name, item in zip(names, inputs, strict=True) if isinstance(item, np.ndarray)},
        ops=(op,),
        outputs=op.outputs,
    )
    return graph, op


def merge(graphs: Sequence[Graph]) -> Graph:
    """Return one graph with the ops of all; a name gets the number of its graph in front."""
    values: dict[str, Value] = {}
    constants: dict[str, Array] = {}
    ops: list[Op] = []
    for number, graph in enumerate(graphs):

        def renamed(names: Sequence[str], number: int = number) -> tuple[str, ...]:
            return tuple(name and f"{number}.{name}" for name in names)

        values |= {f"{number}.{name}": replace(v, name=f"{number}.{name}") for name, v in graph.values.items()}
        constants |= {f"{number}.{name}": array for name, array in graph.constants.items()}
        ops += [
            replace(op, name=f"{number}.{op.name}", inputs=renamed(op.inputs), outputs=renamed(op.outputs))
            for op in graph.ops
        ]
    inputs = tuple(f"{number}.{name}" for number, graph in enumerate(graphs) for name in graph.inputs)
    outputs = tuple(name for op in ops for name in op.outputs if name)
    return Graph("ops", graphs[0].opset, values, inputs, (), constants, tuple(ops), outputs)


def with_sums(rule: Rule) -> Rule:
    """Return a rule without the strategies on terms of means, maxima and the like, and without flags."""
    kept = [s for s in rule.strategies if all(p == Partial() for p in s.inputs if isinstance(p, Partial))]
    return replace(rule, strategies=tuple(replace(s, cyclic=False, uneven=False) for s in kept))


def fits_axis(op: Op, strategy: Strategy, inputs: Sequence[Array | None], outputs: Sequence[Array], size: int) -> bool:
    """Whether a strategy can be used on a mesh axis of this size: all that is split or scaled is divisible."""
    for scaled in strategy.scaled:
        held = inputs[scaled.source] if isinstance(scaled.source, int) else op.attr(scaled.source)
        if np.ravel(np.asarray(held))[scaled.entry] % size:
            return False
    pairs = [*zip(strategy.inputs, inputs, strict=True), *zip(strategy.outputs, outputs, strict=True)]
    sharded = [(a, p) for p, a in pairs if isinstance(p, Shard) and a is not None]
    return all(array.shape[placement.dim] % (size * placement.chunks) == 0 for array, placement in sharded)


def check_rule(graph: Graph, op: Op, rule: Rule, inputs: Sequence[Array | None], size: int) -> int:
    """Assert that devices compute what one computes by each strategy an axis of this size allows, and by its flags.

    Returns:
        How many were checked.
    """
    outputs = [np.empty(graph.values[name].shape if name else ()) for name in op.outputs]
    checked = 0
    for strategy in rule.strategies:
        finer = [multiplied(strategy, factor) for factor in (2, 3) if strategy.cyclic]
        fitting = [way for way in (strategy, *finer) if fits_axis(op, way, inputs, outputs, size)][:2]
        if not fitting and strategy.uneven and smallest_sharded(strategy, inputs, outputs) >= size:
            fitting = [strategy]
        for way in fitting:
            check_strategy(op, way, inputs, graph.opset, size)
        checked += len(fitting)
    return checked


def multiplied(strategy: Strategy, factor: int) -> Strategy:
    """Return a strategy with all shards cut into that many times the chunks."""

    def finer(placement: Placement) -> Placement:
        return Shard(placement.dim, placement.chunks * factor) if isinstance(placement, Shard) else placement

    return replace(strategy, inputs=tuple(map(finer, strategy.inputs)), outputs=tuple(map(finer, strategy.outputs)))


def smallest_sharded(strategy: Strategy, inputs: Sequence[Array | None], outputs: Sequence[Array]) -> int:
    """Return the size of the smallest dim that is sharded."""
    pairs = [*zip(strategy.inputs, inputs, strict=True), *zip(strategy.outputs, outputs, strict=True)]
    return min((a.shape[p.dim] for p, a in pairs if isinstance(p, Shard) and a is not None), default=0)


def check_strategy(op: Op, strategy: Strategy, inputs: Sequence[Array | None], opset: int, size: int) -> None:
    """Assert that `size` devices that follow the strategy compute what one device computes."""
    executor = Executor()
    whole = executor.run(op, inputs, opset)
    if strategy.local is not None and strategy.local.kind in RINGS:
        parts = _in_ring(op, strategy.local, strategy, inputs, opset, size)
        _check_parts(op, strategy, parts, whole)
        return
    parts = []
    for rank in range(size):
        local = [_place(x, p, rank, size) for x, p in zip(inputs, strategy.inputs, strict=True)]
        for halo in strategy.halos:
            local[halo.input] = _with_halo(inputs[halo.input], halo, rank, size)
        attrs = dict(op.attrs)
        for scaled in strategy.scaled:
            if isinstance(scaled.source, int):
                content = np.array(local[scaled.source])
                assert content.reshape(-1)[scaled.entry] % size == 0
                content.reshape(-1)[scaled.entry] //= size
                local[scaled.source] = content
            else:
                value = attrs[scaled.source]
                assert isinstance(value, int)
                assert value % size == 0
                attrs[scaled.source] = value // size
        for number in strategy.replaced:
            value = attrs[number.attr]
            entries = list(value) if isinstance(value, tuple) else [value]
            entries[number.entry] = number.value
            attrs[number.attr] = tuple(entries) if isinstance(value, tuple) else entries[0]  # type: ignore[assignment]
        kind, names = op.kind, op.inputs
        if strategy.local is not None:
            whole_input, sharded = inputs[strategy.local.input], strategy.inputs[strategy.local.input]
            assert whole_input is not None
            assert isinstance(sharded, Shard)
            kind, names = strategy.local.kind, (*names, "start")
            rows = attrs["size"] = whole_input.shape[strategy.local.dim]
            local.append(np.asarray(_blocks(rows, sharded, size)[rank][0], np.int64))
        local_op = Op(op.name, kind, names, op.outputs, tuple(sorted(attrs.items())))
        parts.append(executor.run(local_op, local, opset))
    _check_parts(op, strategy, parts, whole)


def _in_ring(
    op: Op, local: Local, strategy: Strategy, inputs: Sequence[Array | None], opset: int, size: int
) -> list[tuple[Array, ...]]:
    """Return the outputs of devices that run an op together."""
    blocks = []
    for rank in range(size):
        own = [_place(x, p, rank, size) for x, p in zip(inputs, strategy.inputs, strict=True)]
        blocks.append([array for array in own if array is not None])
    rows = [block[local.input].shape[local.dim] for block in blocks]
    starts = [np.asarray(sum(rows[:rank]), np.int64) for rank in range(size)]
    attrs, executor = tuple(sorted({**dict(op.attrs), "size": sum(rows)}.items())), Executor()

    def run(kind: str, arrays: Sequence[Array], num_outputs: int) -> tuple[Array, ...]:
        return executor.run_kind(kind, attrs, arrays, num_outputs, opset)

    ring = RINGS[local.kind]
    steps = ring.steps(op.attrs, rows[0], size) if len(set(rows)) == 1 else size
    parts = run_ring(ring, blocks, starts, run, steps)
    assert parts is not None, "the executor raises"
    return parts


def _check_parts(op: Op, strategy: Strategy, parts: Sequence[tuple[Array, ...]], whole: Sequence[Array]) -> None:
    """Assert that the parts of all devices make the result of one device."""
    for index, placement in enumerate(strategy.outputs):
        if op.outputs[index]:
            together = _gather([part[index] for part in parts], placement)
            message = f"{op.kind}: {strategy}, output {index}"
            np.testing.assert_allclose(together, whole[index], rtol=1e-8, atol=1e-8, err_msg=message)


def _blocks(dim_size: int, placement: Shard, size: int) -> list[NDArray[np.int64]]:
    """Return the numbers of the rows each device holds; blocks may differ by one row if there are no chunks."""
    chunks = np.array_split(np.arange(dim_size), placement.chunks)
    return [np.concatenate([np.array_split(chunk, size)[rank] for chunk in chunks]) for rank in range(size)]


def _place(array: Array | None, placement: Placement, rank: int, size: int) -> Array | None:
    """Return what a device holds of an array."""
    if array is None:
        return None
    match placement:
        case Replicate():
            return array
        case Shard(dim):
            return np.take(array, _blocks(array.shape[dim], placement, size)[rank], axis=dim)
        case Partial(reduce):
            return terms(array, reduce, size)[rank]


def terms(array: Array, reduce: str, size: int) -> list[Array]:
    """Return terms that a reduction makes into the array, of its type."""
    if array.dtype.kind in "iu":
        shift = np.arange(size) - (size - 1) // 2
        spread = {"sum": np.append(shift[:-1], -shift[:-1].sum()), "max": -np.arange(size), "min": np.arange(size)}
        return [
            (array * (reduce != "sum" or rank == 0) + spread[reduce][rank]).astype(array.dtype) for rank in range(size)
        ]
    noise = [np.random.default_rng(i).uniform(-2, 2, array.shape) for i in range(size - 1)]
    match reduce:
        case "sum":
            return [*noise, array - sum(noise)]
        case "mean":
            return [*noise, size * array - sum(noise)]
        case "prod":
            return [*noise, array / np.prod(noise, axis=0)]
        case "max":
            return [array - (rank > 0) * 3.0 * np.abs(np.sin(array * rank)) for rank in range(size)]
        case "min":
            return [array + (rank > 0) * 3.0 * np.abs(np.sin(array * rank)) for rank in range(size)]
        case "logsumexp":
            return [array + np.log((rank + 1) / (size * (size + 1) / 2)) for rank in range(size)]
        case _:
            raise AssertionError(reduce)


def _with_halo(array: Array | None, halo: Halo, rank: int, size: int) -> Array:
    """Return a device's block and the rows around it: a stretch of the padded array."""
    assert array is not None
    lowest = -np.inf if array.dtype.kind == "f" else np.iinfo(array.dtype).min
    widths = [(halo.before, halo.after) if dim == halo.dim else (0, 0) for dim in range(array.ndim)]
    padded = np.pad(array, widths, constant_values=0 if halo.fill == "zero" else lowest)
    block = array.shape[halo.dim] // size
    return np.take(padded, range(rank * block, (rank + 1) * block + halo.before + halo.after), axis=halo.dim)


def _gather(parts: list[Array], placement: Placement) -> Array:
    """Return the array that the devices hold together."""
    match placement:
        case Replicate():
            for part in parts:
                np.testing.assert_allclose(part, parts[0], rtol=1e-9, atol=1e-12)
            return parts[0]
        case Shard(dim):
            size = sum(part.shape[dim] for part in parts)
            rows = _blocks(size, placement, len(parts))
            assert [part.shape[dim] for part in parts] == [len(held) for held in rows]
            return np.take(np.concatenate(parts, axis=dim), np.argsort(np.concatenate(rows)), axis=dim)
        case Partial(reduce):
            stacked = np.stack(parts)
            reductions: dict[str, Callable[..., Array]] = {
                "sum": np.sum,
                "mean": np.mean,
                "max": np.max,
                "min": np.min,
                "prod": np.prod,
                "logsumexp": np.logaddexp.reduce,
            }
            return np.asarray(reductions[reduce](stacked, axis=0))
