"""Units of a block: which parameters one collective gathers if they are sharded, and what each pays of it.

A parameter pays its share of the collective by its bytes, so that the formula stays a sum over parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from autopar.cost import CostModel, DtypePolicy
from autopar.folding.expert_parameters import experts_of
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import element_bytes, states_of
from autopar.ir.graph import Phase

DENSE, EXPERTS = "dense", "experts"
"""Units of a block: parameters that are gathered together, those of experts apart from all others, as in torchtitan and
Megatron FSDP, where they are sharded over other devices."""


@dataclass(frozen=True, slots=True)
class UnitPart:
    """A parameter as part of what a pass through a block gathers at once.

    Attributes:
        unit: `DENSE` or `EXPERTS`.
        parts: Bytes of the unit over those of the parameter.
    """

    unit: str
    parts: float


NO_UNIT = UnitPart("", 1.0)
"""What is no parameter, and travels alone."""

Units = Mapping[tuple[int, bool], Mapping[str, UnitPart]]
"""Units by kind of block and whether the pass is the backward, then by parameter."""


def gather_units(folded: Folded, costs: CostModel, sizes: tuple[int, ...]) -> Units:
    """Return the units in which parameters are gathered on a mesh with axes of these sizes, if they are sharded.

    There are none where the stack gathers every parameter by itself.

    A unit counts all parameters that a pass reads and some axis can split. Where a plan keeps some of them whole, the
    others pay less than the whole latency of their gather in the formula; the simulator times what is gathered.
    """
    if costs.stack.gathers == "parameter":
        return {(kind.id, backward): {} for kind in folded.kinds for backward in (False, True)}
    return _gather_units(folded.pattern, costs.policy, sizes)


@lru_cache(maxsize=64)
def _gather_units(folded: Folded, policy: DtypePolicy, sizes: tuple[int, ...]) -> Units:
    _, wire = element_bytes(folded, policy)
    experts, values, parameters = experts_of(folded), folded.graph.values, states_of(folded).parameters
    found: dict[tuple[int, bool], Mapping[str, UnitPart]] = {}
    for kind in folded.kinds:
        for backward in (False, True):
            units: dict[str, str] = {}
            for op in kind.ops:
                if op.phase is not Phase.UPDATE and (op.phase is Phase.BACKWARD) == backward:
                    read = (name for name in op.inputs if name in parameters)
                    units |= {name: EXPERTS if name in experts else DENSE for name in read}
            nbytes = {name: values[name].size * wire[name] for name in units}
            totals: dict[str, float] = {}
            for name, unit in units.items():
                if any(own % size == 0 for own in values[name].shape for size in sizes if size > 1):
                    totals[unit] = totals.get(unit, 0.0) + nbytes[name]
            found[kind.id, backward] = {
                name: UnitPart(unit, max(1.0, totals.get(unit, 0.0) / nbytes[name]) if nbytes[name] else 1.0)
                for name, unit in units.items()
            }
    return found
