"""Shardy as an oracle: the sharding rule its authors wrote for an op, next to the one discovery finds by execution.

Shardy gives a StableHLO op an einsum-like rule: every dim of every tensor is a product of *factors*, all dims a factor
stands on are sharded together, and some factors are marked: the shards have to be reduced (`reduction`), to exchange
rows (`permutation`), or cannot be used at all (`need_replication`). A factor that may be sharded is a strategy of ours.

The passes come with `jaxlib` and need no accelerator.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autopar.discover import Rule, Strategy, discover
from autopar.ir.graph import Attr, Graph
from autopar.sharding import Partial, Placement, Replicate, Shard
from tests.single_ops import Input, merge, single_op

_PASSES = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
_TYPES = {"float64": "f64", "float32": "f32", "int64": "i64", "int32": "i32", "uint64": "ui64", "bool": "i1"}
_TENSOR = re.compile(r"tensor<(?:[^<>]|<[^<>]*>)*>")


@dataclass(frozen=True)
class Case:
    """One op, said twice.

    Attributes:
        kind: Our op kind.
        expert: The StableHLO op of the same meaning, without its dialect.
        inputs: Inputs of our op.
        hlo: The StableHLO op without its type: `%x0` is our first input, `%y0` an operand our op has no input for.
        attrs: Attributes of our op.
        num_outputs: Outputs of our op, which are those of the StableHLO op unless `types` says more.
        types: The type of the StableHLO op if it is not that of ours, in which other operands are scalars.
        missing: Strategies the expert allows and discovery does not find, each with the reason why that is right.
    """

    kind: str
    expert: str
    inputs: Sequence[Input]
    hlo: str
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    num_outputs: int = 1
    types: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[int | None, ...]:
        """Our input for each operand of the StableHLO op; None for one without."""
        return tuple(int(name[1:]) if name.startswith("x") else None for name in _operands(self.hlo))


def _operands(hlo: str) -> list[str]:
    """Return the names of the operands of an op; those in its regions are called a, b, c, d, m, n, v."""
    return re.findall(r"%(x\d+|y\d*)\b", hlo)


Dims = tuple[tuple[int, ...], ...]
"""The factors of each dim of a tensor, the major one first."""


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """A rule of Shardy.

    Attributes:
        text: As Shardy prints it.
        sizes: Size per factor.
        operands: Per tensor, the factors of each dim.
        results: The same.
        reduction: Factors whose shards give terms of a reduction.
        need_replication: Factors that cannot be sharded.
        permutation: Factors whose shards have to exchange rows.
        blocked: Factors that can be sharded, but not just because a neighbour is.
    """

    text: str
    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduction: frozenset[int]
    need_replication: frozenset[int]
    permutation: frozenset[int]
    blocked: frozenset[int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A strategy the expert allows on one mesh axis.

    A factor behind another one in its dim, as the 8 columns of a head in 12 heads of 8, is a block-cyclic shard there,
    in as many chunks as the factors before it are large. (Shardy has no such shards: it uses a factor of this kind only
    behind axes that use up the ones before it.)

    Attributes:
        mark: "", "reduction" or "permutation".
        inputs: Placement per input of our op; None for one the StableHLO op does not have.
        outputs: Placement per output of our op.
    """

    mark: str
    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        sides = (",".join(str(one or "_") for one in placements) for placements in (self.inputs, self.outputs))
        return " -> ".join(sides)

    def is_met_by(self, strategy: Strategy) -> bool:
        """Whether a strategy shards the same dims, and reduces where the expert does.

        The expert says neither which reduction it is nor what happens to the inputs that stay whole.
        """

        def agrees(wanted: Placement | None, found: Placement) -> bool:
            match wanted:
                case None:
                    return True
                case Partial():
                    return isinstance(found, Partial)
                case Shard():
                    return found == wanted
                case Replicate():
                    return not isinstance(found, Shard)

        outputs = zip(self.outputs, strategy.outputs, strict=True)
        return (
            all(agrees(wanted, found) for wanted, found in zip(self.inputs, strategy.inputs, strict=True))
            and all(agrees(wanted, found) and type(wanted) is type(found) for wanted, found in outputs)
            and not strategy.is_replicate
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What expert and discovery say about a case.

    Attributes:
        case: The case.
        expert: Shardy's rule.
        rule: Ours.
        met: Strategies of the expert that discovery finds.
        missed: Those it does not find.
        beyond: Strategies of discovery the expert does not know.
    """

    case: Case
    expert: ExpertRule
    rule: Rule
    met: tuple[Wanted, ...]
    missed: tuple[Wanted, ...]
    beyond: tuple[Strategy, ...]


def compare(cases: Sequence[Case]) -> list[Comparison]:
    """Return what Shardy and discovery say about each case."""
    graphs = [single_op(case.kind, case.inputs, case.num_outputs, **case.attrs)[0] for case in cases]
    graph = merge(graphs)
    rules = discover(graph)
    experts = expert_rules([module_text(case, one) for case, one in zip(cases, graphs, strict=True)])
    comparisons = []
    for case, op, expert in zip(cases, graph.ops, experts, strict=True):
        rule = rules.of(op)
        allowed = wanted(case, expert)
        found = rule.strategies
        met = tuple(one for one in allowed if any(one.is_met_by(strategy) for strategy in found))
        beyond = tuple(s for s in found if not s.is_replicate and not any(one.is_met_by(s) for one in allowed))
        missed = tuple(one for one in allowed if one not in met)
        comparisons.append(Comparison(case, expert, rule, met, missed, beyond))
    return comparisons


def module_text(case: Case, graph: Graph) -> str:
    """Return the StableHLO function of a case; `{name}` stands for its name."""

    def tensor(name: str) -> str:
        value = graph.values[name]
        return f"tensor<{''.join(f'{size}x' for size in value.shape)}{_TYPES[value.dtype]}>"

    outputs = graph.ops[0].outputs
    names = _operands(case.hlo)
    types = case.types
    if not types:
        scalar = f"tensor<{_TYPES[graph.values[outputs[0]].dtype]}>"
        given = ", ".join(tensor(name) if name in graph.values else scalar for name in names)
        types = f"({given}) -> ({', '.join(map(tensor, outputs))})"
    before, _, after = types.partition(" -> ")
    arguments = dict(zip(names, _TENSOR.findall(before), strict=True))
    count = len(_TENSOR.findall(after))
    return (
        f"func.func @{{name}}({', '.join(f'%{name}: {type_}' for name, type_ in arguments.items())}) {{\n"
        f"  %r{f':{count}' if count > 1 else ''} = {case.hlo} : {types}\n  return\n}}\n"
    )


def expert_rules(functions: Sequence[str]) -> list[ExpertRule]:
    """Return Shardy's rule for the last op of each function.

    Raises:
        AssertionError: If Shardy has no rule for one.
    """
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import sdy

    text = "".join(function.replace("{name}", f"f{i}") for i, function in enumerate(functions))
    with mlir.make_ir_context():
        module = ir.Module.parse(f"module {{\n{text}}}")
        passmanager.PassManager.parse(_PASSES).run(module.operation)
        rules = []
        for function in module.body.operations:
            *_, op, _ = function.regions[0].blocks[0].operations
            assert "sdy.sharding_rule" in op.attributes, f"Shardy has no rule for {op}"
            rules.append(_expert_rule(sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"]), sdy))
    return rules


def _expert_rule(attribute: Any, sdy: Any) -> ExpertRule:
    """Return a rule as a record.

    Args:
        attribute: The rule in MLIR.
        sdy: The dialect's module.
    """

    def tensors(mappings: Any) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in sdy.TensorMappingAttr(tensor).dim_mappings)
            for tensor in mappings
        )

    text = str(attribute)
    return ExpertRule(
        text=text[text.index("<") + 1 : text.rindex(">")],
        sizes=tuple(attribute.factor_sizes),
        operands=tensors(attribute.operand_mappings),
        results=tensors(attribute.result_mappings),
        reduction=frozenset(attribute.reduction_factors),
        need_replication=frozenset(attribute.need_replication_factors),
        permutation=frozenset(attribute.permutation_factors),
        blocked=frozenset(attribute.blocked_propagation_factors),
    )


def wanted(case: Case, expert: ExpertRule) -> list[Wanted]:
    """Return the strategies an expert's rule allows, one per factor that can be sharded."""
    result = []
    for factor, size in enumerate(expert.sizes):
        if size == 1 or factor in expert.need_replication:
            continue
        placed = {
            index: _placement(dims, factor, expert.sizes)
            for index, dims in zip(case.operands, expert.operands, strict=True)
            if index is not None
        }
        inputs = tuple(placed.get(index) for index in range(len(case.inputs)))
        outputs = [_placement(dims, factor, expert.sizes) for dims in expert.results[: case.num_outputs]]
        if factor in expert.reduction:
            outputs = [Partial() if placement == Replicate() else placement for placement in outputs]
        both = (*inputs, *outputs)
        mark = "reduction" if factor in expert.reduction else "permutation" if factor in expert.permutation else ""
        if any(isinstance(placement, Shard) for placement in both):
            result.append(Wanted(mark, inputs, tuple(outputs)))
    return result


def _placement(dims: Dims, factor: int, sizes: Sequence[int]) -> Placement:
    """Return how a tensor is placed if one factor of its dims is sharded."""
    for dim, factors in enumerate(dims):
        if factor in factors:
            return Shard(dim, chunks=prod(sizes[major] for major in factors[: factors.index(factor)]))
    return Replicate()
