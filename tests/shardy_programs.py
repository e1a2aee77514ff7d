"""Shardy's propagation as an oracle: small random programs under random schedules, said to Shardy and to tactics.

A program is a chain of ops over floats of rank 2 and 3. The same program is a graph of ours and a StableHLO function. A
schedule is a list of shards of inputs, one after the other. What is compared is where every value lies when nothing
follows any more: the mesh axes of each of its dims.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from autopar.discover import discover
from autopar.folding.fold import fold
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph
from autopar.models.builder import Builder
from autopar.onnx import load
from autopar.sharding import Mesh
from autopar.tactics import Shard
from autopar.tactics.apply import Applier
from autopar.tactics.propagate import Conflict
from autopar.tactics.state import PINNED, State, Topology

MESH = Mesh.of(a=2, b=2)
SIZES = (4, 8, 12)
_PASSES = {True: "builtin.module(sdy-user-priority-propagate)", False: "builtin.module(sdy-aggressive-propagate)"}
"""Shardy's propagation: element-wise ops before others, or all of them alike."""
_SHARDING = "sdy.sharding"

Layout = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of a value, the major one first."""


@dataclass(frozen=True)
class Line:
    """One op, with what it reads and the shape of what it makes."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    shape: tuple[int, ...]
    dims: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """A program: inputs with their shapes, and ops in order."""

    inputs: Mapping[str, tuple[int, ...]]
    lines: tuple[Line, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every value."""
        return dict(self.inputs) | {line.output: line.shape for line in self.lines}

    @property
    def results(self) -> tuple[str, ...]:
        """Values nobody reads."""
        read = {name for line in self.lines for name in line.inputs}
        return tuple(line.output for line in self.lines if line.output not in read)

    def graph(self) -> Graph:
        """Return it as a graph of ours."""
        g = Builder("program")
        for name, shape in self.inputs.items():
            g.input(name, shape)
        for line in self.lines:
            match line.kind:
                case "Transpose":
                    g.op("Transpose", *line.inputs, name=line.output, perm=line.dims)
                case "ReduceSum":
                    g.op("ReduceSum", *line.inputs, g.constant(line.dims), name=line.output, keepdims=0)
                case kind:
                    g.op(kind, *line.inputs, name=line.output)
        return find_blocks(load(g.model({name: self.shapes[name] for name in self.results})))

    def state(self) -> State:
        """Return its values with nothing decided."""
        folded = fold(self.graph())
        return State(Topology(folded, discover(folded.graph), MESH))

    def stablehlo(self) -> str:
        """Return it as a function of StableHLO whose arguments are open: nothing is said of where they lie."""
        arguments = ", ".join(
            f"%{name}: {_tensor(shape)} {{{_SHARDING} = {_sharding(((),) * len(shape))}}}"
            for name, shape in self.inputs.items()
        )
        body = "".join(f"  {_statement(line, self.shapes)}\n" for line in self.lines)
        types = ", ".join(_tensor(self.shapes[name]) for name in self.results)
        axes = ", ".join(f'"{axis.name}"={axis.size}' for axis in MESH.axes)
        returned = ", ".join(f"%{name}" for name in self.results)
        return (
            f"module {{\nsdy.mesh @mesh = <[{axes}]>\nfunc.func @main({arguments}) -> ({types}) {{\n{body}"
            f"  return {returned} : {types}\n}}\n}}"
        )


def _tensor(shape: Sequence[int]) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}f64>"


def _sharding(layout: Layout) -> str:
    """Return a layout as Shardy writes it, open to more axes on every dim."""
    dims = ", ".join("{" + "".join(f'"{axis}", ' for axis in axes) + "?}" for axes in layout)
    return f"#sdy.sharding<@mesh, [{dims}]>"


def _statement(line: Line, shapes: Mapping[str, tuple[int, ...]]) -> str:
    operands = ", ".join(f"%{name}" for name in line.inputs)
    types = ", ".join(_tensor(shapes[name]) for name in line.inputs)
    result, signature = f"%{line.output}", f"({types}) -> {_tensor(line.shape)}"
    match line.kind:
        case "MatMul":
            rank = len(line.shape)
            batch = ", ".join(map(str, range(rank - 2)))
            batching = f" batching_dims = [{batch}] x [{batch}]," if batch else ""
            dims = f"{batching} contracting_dims = [{rank - 1}] x [{rank - 2}]"
            return f"{result} = stablehlo.dot_general {operands},{dims} : {signature}"
        case "Transpose":
            return f"{result} = stablehlo.transpose {operands}, dims = {list(line.dims)} : {signature}"
        case "ReduceSum":
            start = f"%zero_{line.output} = stablehlo.constant dense<0.0> : tensor<f64>\n  "
            dims = f"across dimensions = {list(line.dims)} : ({types}, tensor<f64>) -> {_tensor(line.shape)}"
            return (
                f"{start}{result} = stablehlo.reduce({operands} init: %zero_{line.output}) applies stablehlo.add {dims}"
            )
        case kind:
            name = {"Add": "add", "Mul": "multiply", "Tanh": "tanh", "Neg": "negate"}[kind]
            return f"{result} = stablehlo.{name} {operands} : {_tensor(line.shape)}"


def propagated(program: Program, schedule: Sequence[Shard], *, elementwise_first: bool = True) -> dict[str, Layout]:
    """Return where Shardy puts the values of a program.

    Shardy would let a shard said of an input stand from the start and use priorities for propagation only. Tactics come
    one after the other, so each is added to what the propagation of those before has decided, and refused if that used
    its axis.
    """
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir, passmanager

    with mlir.make_ir_context():
        module = ir.Module.parse(program.stablehlo())
        (function,) = (op for op in module.body.operations if op.operation.name == "func.func")
        for tactic in schedule:
            ((name, dim),) = tactic.inputs.items()
            arguments = list(function.attributes["arg_attrs"])
            number = [*program.inputs].index(str(name))
            layout = _layout(str(arguments[number][_SHARDING]))
            if not any(tactic.axis in axes for axes in layout):
                layout = tuple((*axes, tactic.axis) if index == dim else axes for index, axes in enumerate(layout))
                arguments[number] = ir.DictAttr.get({_SHARDING: ir.Attribute.parse(_sharding(layout))})
                function.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
            passmanager.PassManager.parse(_PASSES[elementwise_first]).run(module.operation)
        found = {
            name: _layout(str(attributes[_SHARDING]))
            for name, attributes in zip(program.inputs, function.attributes["arg_attrs"], strict=True)
        }
        ops = [op for op in function.regions[0].blocks[0].operations if "constant" not in op.operation.name]
        for line, op in zip(program.lines, ops[:-1], strict=True):
            has = _SHARDING in op.attributes
            found[line.output] = _layout(str(op.attributes[_SHARDING])) if has else ((),) * len(line.shape)
    return found


def _layout(text: str) -> Layout:
    """Return the axes of each dim, given a sharding as Shardy prints it."""
    dims = re.findall(r"\{([^{}]*)\}", text[text.index("@mesh") :])
    return tuple(tuple(re.findall(r'"(\w+)"', dim)) for dim in dims)


def placed(state: State) -> dict[str, Layout]:
    """Return where tactics have put the values of a graph."""
    found = {}
    for name, value in state.topology.folded.graph.values.items():
        dims: list[list[tuple[int, str]]] = [[] for _ in value.shape]
        for axis, decided in state.splits.get(state.topology.of(name), {}).items():
            if decided.dim != PINNED:
                dims[decided.dim].append((axis, MESH.axes[axis].name))
        found[name] = tuple(tuple(name for _, name in sorted(axes)) for axes in dims)
    return found


@dataclass(frozen=True)
class Difference:
    """Where tactics and Shardy put values, and why that is not the same.

    Attributes:
        values: Values that lie elsewhere, with our layout and Shardy's.
        conflicts: Where decisions did not go together, as tactics report it.
        order: Whether Shardy comes to the same if it does not look at element-wise ops first.
    """

    values: Mapping[str, tuple[Layout, Layout]]
    conflicts: tuple[Conflict, ...]
    order: bool

    @property
    def reason(self) -> str:
        """Why it is as it should be; "" if nothing says so."""
        if not self.values:
            return "same"
        return "order" if self.order else "conflict" if self.conflicts else ""


def difference(program: Program, schedule: Sequence[Shard], state: State) -> Difference:
    """Apply a schedule to the state of a program's graph, and return how Shardy differs.

    Which of two axes on one dim is the major one is fixed by the mesh with us, so that it is not compared.
    """
    applier = Applier(state, {})
    conflicts = [conflict for i, tactic in enumerate(schedule) for conflict in applier.apply(tactic, i).conflicts]
    ours = placed(state)

    def elsewhere(*, elementwise_first: bool) -> dict[str, tuple[Layout, Layout]]:
        theirs = propagated(program, schedule, elementwise_first=elementwise_first)
        # an op that computes what another one does is not in our graph
        both = {name: (ours[name], layout) for name, layout in theirs.items() if name in ours}
        return {name: (own, other) for name, (own, other) in both.items() if _unordered(own) != _unordered(other)}

    values = elsewhere(elementwise_first=True)
    return Difference(values, tuple(conflicts), bool(values) and not elsewhere(elementwise_first=False))


def _unordered(layout: Layout) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(axes) for axes in layout)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of up to seven ops."""
    rank = draw(st.sampled_from([2, 2, 3]))
    inputs: dict[str, tuple[int, ...]] = {"x0": tuple(draw(st.sampled_from(SIZES)) for _ in range(rank))}
    shapes = dict(inputs)
    lines: list[Line] = []

    def fresh(shape: tuple[int, ...]) -> str:
        """A value of this shape: one there is, or a new input."""
        known = [name for name, own in shapes.items() if own == shape]
        old = draw(st.sampled_from([*known, ""]))
        if old:
            return old
        name = f"x{len(inputs)}"
        inputs[name] = shapes[name] = shape
        return name

    for number in range(draw(st.integers(1, 7))):
        name = draw(st.sampled_from([name for name, shape in shapes.items() if len(shape) > 1]))
        shape = shapes[name]
        kind = draw(st.sampled_from(["MatMul", "MatMul", "Add", "Mul", "Tanh", "Neg", "Transpose", "ReduceSum"]))
        operands: tuple[str, ...] = (name,)
        dims: tuple[int, ...] = ()
        made = shape
        match kind:
            case "MatMul":
                width = draw(st.sampled_from(SIZES))
                operands = (name, fresh((*shape[:-2], shape[-1], width)))
                made = (*shape[:-1], width)
            case "Add" | "Mul":
                operands = (name, fresh(shape))
            case "Transpose":
                dims = draw(st.sampled_from(list(permutations(range(len(shape))))[1:]))
                made = tuple(shape[dim] for dim in dims)
            case "ReduceSum":
                dims = (draw(st.integers(0, len(shape) - 1)),)
                made = tuple(size for index, size in enumerate(shape) if index not in dims)
        output = f"v{number}"
        lines.append(Line(kind, operands, output, made, dims))
        shapes[output] = made
    program = Program(inputs, tuple(lines))
    # equal blocks are split alike, which Shardy does not know
    assume(all(kind.count == 1 for kind in fold(program.graph()).kinds))
    return program


@st.composite
def schedules(draw: st.DrawFn, program: Program) -> list[Shard]:
    """Up to four shards of inputs, each of one input over one axis."""
    found: list[Shard] = []
    taken: set[tuple[str, str]] = set()
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(program.inputs)))
        axis = draw(st.sampled_from([axis.name for axis in MESH.axes]))
        dim = draw(st.integers(0, len(program.inputs[name]) - 1))
        if (name, axis) not in taken:
            taken.add((name, axis))
            found.append(Shard({name: dim}, axis))
    return found


def _main(count: int) -> None:
    """Print how many of so many random programs under random schedules lie alike, and why the others do not."""
    found: Counter[str] = Counter()

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(data=st.data())
    def compare(data: st.DataObject) -> None:
        program = data.draw(programs())
        schedule = data.draw(schedules(program))
        found[difference(program, schedule, program.state()).reason or "unexplained"] += 1

    compare()
    sys.stdout.write(", ".join(f"{reason}: {number}" for reason, number in found.most_common()) + "\n")


if __name__ == "__main__":
    _main(int(sys.argv[1]))
