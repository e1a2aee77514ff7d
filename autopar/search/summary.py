"""The plan in one line, in the field's words.

The solver decides op by op what a mesh axis does; the line says what it does to most of the elements: an axis that
splits dim 0 of most activations is data parallel, one that splits most parameters where they are used is tensor
parallel (expert parallel where it splits dim 0 of rank-3 parameters), one that splits dim 1 of most activations is
sequence parallel, one that splits height or width of most activations is spatially parallel. An axis that does none of
this but splits some of the parameters is tensor parallel in part of the model.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from autopar.formulate.fold import Folded
from autopar.ir.graph import Phase, Role
from autopar.plan import Plan
from autopar.recompute import parse_recompute
from autopar.sharding import Placement, Placements, Shard, parse_placements

_SOME = 0.05
"""Share of the parameters that makes an axis more than idle."""


@dataclass(slots=True)
class _Tally:
    """Elements by how one axis places them."""

    total: float = 0.0
    split: float = 0.0
    first: float = 0.0
    second: float = 0.0
    spatial: float = 0.0

    def add(self, placement: Placement, elements: float, rank: int) -> None:
        self.total += elements
        if isinstance(placement, Shard):
            self.split += elements
            self.first += elements * (placement.dim == 0)
            self.second += elements * (placement.dim == 1)
            self.spatial += elements * (placement.dim >= 2 and rank >= 4)

    def most(self, part: float) -> bool:
        return self.total > 0 and part > 0.5 * self.total


@dataclass(slots=True)
class _AxisTallies:
    """What one axis does to activations, parameters used and stored, gradient sums, updates and boundaries."""

    activations: _Tally
    used: _Tally
    experts: _Tally
    stored: _Tally
    gradients: _Tally
    updates: _Tally
    boundaries: _Tally


def summarise(plan: Plan, folded: Folded) -> Plan:
    """Return the plan of a folded graph with its one-line summary."""
    axes = [_AxisTallies(*(_Tally() for _ in range(7))) for _ in plan.mesh]
    _tally(axes, plan, folded)
    degrees = {"dp": 1, "tp": 1, "ep": 1, "sp": 1, "spatial": 1, "idle": 1}
    notes: dict[str, list[str]] = {name: [] for name in degrees}
    levels: dict[str, set[int]] = {name: set() for name in degrees}
    for axis, tallies in zip(plan.mesh, axes, strict=True):
        if axis.size == 1:
            continue
        role = _role(tallies)
        degrees[role] *= axis.size
        if role in ("dp", "sp", "spatial"):
            levels[role].add(_zero(tallies))
        if role == "tp":
            if not tallies.used.most(tallies.used.split):
                notes[role] = ["in part"]
            elif tallies.boundaries.most(tallies.boundaries.second):
                notes[role] = ["sequence parallel"]
    for role, found in levels.items():
        if any(found):
            # Two axes of one role may differ: ZeRO over the links inside a node only, say.
            notes[role].append("zero-" + "/".join(str(level) for level in sorted(found)))
    words = [
        f"{name}={degree}" + (f" ({', '.join(notes[name])})" if notes[name] else "")
        for name, degree in degrees.items()
        if degree > 1 or name == "dp"
    ]
    groups = len({stage.devices for stage in plan.stages})
    each = f" ({len(plan.stages) // groups} stages each)" if groups < len(plan.stages) else ""
    words.append(f"pp={groups}{each}")
    microbatches = f"{plan.num_microbatches} microbatch{'es' if plan.num_microbatches > 1 else ''} of {plan.microbatch}"
    return replace(plan, summary=f"{' × '.join(words)}, {_schedule(plan)}{microbatches}, {_recompute(plan)}")


def _schedule(plan: Plan) -> str:
    return f"{plan.schedule.upper() if plan.schedule == '1f1b' else plan.schedule}, " if len(plan.stages) > 1 else ""


def _recompute(plan: Plan) -> str:
    """Return which flavours the layers have: blocks that occur more than once, all blocks if none does."""
    layers = {index for block in plan.blocks if len(block.instances) > 1 for index in block.instances}
    counts: Counter[str] = Counter()
    for stage in plan.stages:
        first, last = stage.blocks
        flavours = parse_recompute(stage.recompute, last - first)
        counts.update(str(flavour) for index, flavour in enumerate(flavours, first) if not layers or index in layers)
    if len(counts) == 1:
        name = next(iter(counts))
        return "no recompute" if name == "none" else f"{name} recompute"
    parts = [f"{name} recompute in {count}" for name, count in sorted(counts.items()) if name != "none"]
    return f"{' and '.join(parts)} of {counts.total()} {'layers' if layers else 'blocks'}"


def _role(tallies: _AxisTallies) -> str:
    if tallies.activations.most(tallies.activations.first):
        return "dp"
    if (
        tallies.experts.total
        and tallies.experts.most(tallies.experts.first)
        and not tallies.used.most(tallies.used.split)
    ):
        return "ep"
    if tallies.used.most(tallies.used.split):
        return "tp"
    if tallies.activations.most(tallies.activations.second):
        return "sp"
    if tallies.activations.most(tallies.activations.spatial):
        return "spatial"
    return "tp" if tallies.used.split > _SOME * tallies.used.total else "idle"


def _zero(tallies: _AxisTallies) -> int:
    if tallies.stored.most(tallies.stored.split) and not tallies.used.most(tallies.used.split):
        return 3
    if tallies.gradients.most(tallies.gradients.split):
        return 2
    return 1 if tallies.updates.most(tallies.updates.split) else 0


def _tally(axes: list[_AxisTallies], plan: Plan, folded: Folded) -> None:
    graph = folded.graph
    parameters = {state.input for state in graph.states if state.role is Role.PARAMETER}
    written = {state.output: state.role for state in graph.states if state.output != state.input}
    shares = {parameter.value.name: parameter.count for parameter in folded.parameters}

    def add(field: str, name: str, text: str, weight: float) -> None:
        value = graph.values[name]
        for tallies, placement in zip(axes, _parsed(text), strict=True):
            getattr(tallies, field).add(placement, weight * value.size, len(value.shape))

    for block in plan.blocks:
        kind = folded.kinds[block.kind]
        for state in block.states:
            add("stored", state.value, state.placement, shares.get(state.value, kind.count))
        for departure in block.departures:
            add("boundaries", departure.value, departure.placement, kind.count)
        for op, placed in zip(kind.ops, block.ops, strict=True):
            for name, text in zip(op.inputs, placed.inputs, strict=True):
                if text and name in parameters and op.phase is Phase.FORWARD:
                    shape = graph.values[name].shape
                    if len(shape) > 1:
                        add("used", name, text, kind.count)
                    if len(shape) == 3:
                        add("experts", name, text, kind.count)
            for name, text in zip(op.outputs, placed.outputs, strict=True):
                if not text or not name:
                    continue
                shape = graph.values[name].shape
                role = written.get(name)
                if role is Role.GRADIENT:
                    add("gradients", name, text, kind.count)
                elif role is Role.PARAMETER:
                    add("updates", name, text, kind.count)
                elif op.phase is Phase.FORWARD and len(shape) > 1 and graph.values[name].is_float:
                    add("activations", name, text, kind.count)


@cache
def _parsed(text: str) -> Placements:
    return parse_placements(text)
