"""Units of a block: which parameters one collective gathers if they are sharded, and what each pays of it.

A parameter pays its share of the bytes of the collective, and a part of its latency, so that the formula stays a sum
over parameters. That part is half by bytes, half equal among all parameters: by bytes alone a plan that gathers nothing
but norms would seem to gather them for nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

from autopar.cost import CostModel, DtypePolicy, is_view
from autopar.cost.reshard import ALONE, Share
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
        unit: `DENSE` or `EXPERTS`, or the parameter if it is gathered by itself.
        share: What the parameter pays of the gather.
    """

    unit: str
    share: Share


NO_UNIT = UnitPart("", ALONE)
"""A value that is no parameter: no other value shares its collective."""

Units = Mapping[tuple[int, bool], Mapping[str, UnitPart]]
"""Units by kind of block and whether the pass is the backward, then by parameter."""


def parameter_views(folded: Folded) -> Mapping[str, str]:
    """Return the values of the forward that are a parameter seen otherwise, such as a tied table transposed.

    They exist before a pass as the parameter does, so that they are gathered ahead like one.
    """
    return _parameter_views(folded.pattern)


@lru_cache(maxsize=32)
def _parameter_views(folded: Folded) -> dict[str, str]:
    parameters, values = states_of(folded).parameters, folded.graph.values
    found: dict[str, str] = {}
    for kind in folded.kinds:
        for op in kind.ops:
            source = op.inputs[0] if op.inputs else ""
            if op.phase is Phase.BACKWARD or source not in parameters | found.keys():
                continue
            if is_view(op, len(values[source].shape)) and not set(op.inputs[1:]) - folded.free - {""}:
                found[op.outputs[0]] = found.get(source, source)
    return found


def gather_units(folded: Folded, costs: CostModel, sizes: tuple[int, ...]) -> Units:
    """Return the units in which parameters are gathered on a mesh with axes of these sizes, if they are sharded.

    Every parameter is a unit where the stack gathers each by itself. A unit counts all parameters that a pass reads and
    some axis can split. Where a plan keeps some of them whole, the others pay less than the whole latency of their
    gather in the formula; the simulator times what is gathered. A view of a parameter counts as the parameter.
    """
    return _gather_units(folded.pattern, costs.policy, costs.stack.gathers == "parameter", sizes)


@lru_cache(maxsize=64)
def _gather_units(folded: Folded, policy: DtypePolicy, alone: bool, sizes: tuple[int, ...]) -> Units:
    _, wire = element_bytes(folded, policy)
    experts, values, parameters = experts_of(folded), folded.graph.values, states_of(folded).parameters
    views = parameter_views(folded)

    def unit_of(parameter: str) -> str:
        return parameter if alone else EXPERTS if parameter in experts else DENSE

    found: dict[tuple[int, bool], Mapping[str, UnitPart]] = {}
    for kind in folded.kinds:
        for backward in (False, True):
            ops = (op for op in kind.ops if op.phase is not Phase.UPDATE and (op.phase is Phase.BACKWARD) == backward)
            read = dict.fromkeys(name for op in ops for name in op.inputs if name in parameters or name in views)
            origins = {name: views.get(name, name) for name in read}
            nbytes = {name: values[name].size * wire[name] for name in origins.values()}
            members: dict[str, list[float]] = {}
            for name, size in nbytes.items():
                if any(own % axis == 0 for own in values[name].shape for axis in sizes if axis > 1):
                    members.setdefault(unit_of(name), []).append(size)
            found[kind.id, backward] = {
                name: UnitPart(unit_of(own), _share(nbytes[own], members.get(unit_of(own), [])))
                for name, own in origins.items()
            }
    return found


def _share(nbytes: float, members: Sequence[float]) -> Share:
    """Compute the share a parameter of `nbytes` pays of one gather of parameters with the bytes `members`."""
    if not nbytes or not members:
        return ALONE
    parts = max(1.0, fsum(members) / nbytes)
    return Share(parts, (1.0 / parts + 1.0 / len(members)) / 2)
