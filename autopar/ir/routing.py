"""Which experts tokens choose, and how many parts of the experts they reach: what a dispatcher has to send.

Routers are taken to be balanced, as training makes them: every set of `top_k` experts that the groups allow is as
likely as any other. A token then reaches, of P equal parts of E experts,

    P (1 - q(E, E / P)),   q(E, n) = probability that none of n experts is among the chosen top_k of E

and with groups, of which a token chooses some, that of the experts in the chosen groups.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import comb, prod

from autopar.ir.fills import READERS, ROW_DIMS
from autopar.ir.graph import Op, Value

_DISPATCH = "autopar::ExpertDispatch"
_GROUPS = ("groups", "chosen_groups")


@dataclass(frozen=True, slots=True)
class Routing:
    """How many experts a token chooses of how many.

    Attributes:
        experts: Experts of a layer.
        top_k: Experts of a token.
        groups: Equal groups of consecutive experts, some of which a token chooses before it chooses experts in these.
        chosen_groups: How many of them.
    """

    experts: int
    top_k: int
    groups: int = 1
    chosen_groups: int = 1

    def reached(self, parts: int) -> float:
        """Return how many of so many equal parts of the experts hold an expert that a token chose, on average.

        Args:
            parts: Number of parts, each of consecutive experts.

        >>> round(Routing(128, 8).reached(4), 2), round(Routing(256, 8, 8, 4).reached(4), 2), Routing(8, 2).reached(1)
        (3.63, 2.93, 1.0)
        """
        return _reached(self, min(parts, self.experts))


@lru_cache(maxsize=1024)
def _reached(routing: Routing, parts: int) -> float:
    part = routing.experts / parts
    groups, chosen = routing.groups, routing.chosen_groups
    if parts % groups == 0:  # parts lie within groups
        open_experts = routing.experts * chosen / groups
        return parts * chosen / groups * (1.0 - _missed(open_experts, part, routing.top_k))
    if groups % parts:  # parts cut groups: as if there were none, which reaches more
        return parts * (1.0 - _missed(routing.experts, part, routing.top_k))
    inside, size = groups // parts, routing.experts / groups
    missed = 0.0
    for count in range(min(inside, chosen) + 1):  # chosen groups that are in the part
        likely = comb(inside, count) * comb(groups - inside, chosen - count) / comb(groups, chosen)
        missed += likely * _missed(chosen * size, count * size, routing.top_k)
    return parts * (1.0 - missed)


def _missed(experts: float, part: float, top_k: int) -> float:
    """Return the probability that none of the experts of a part is among the chosen ones."""
    return prod(max(0.0, experts - part - number) / max(experts - number, 1.0) for number in range(top_k))


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows of experts whose placement changes on one mesh axis.

    Attributes:
        routing: Which experts the tokens chose.
        parts: Of rows that go to the devices of their experts or come back, parts that the experts are in by other
            axes; 0 of rows whose experts stay where they are.
    """

    routing: Routing
    parts: int = 1


def routings(ops: Iterable[Op], values: Mapping[str, Value]) -> dict[str, Routing]:
    """Return the values that are rows of experts, and which of these their tokens chose.

    Args:
        ops: In order.
        values: By name, with global shapes.
    """
    found: dict[str, Routing] = {}
    for op in ops:
        if op.kind == _DISPATCH:
            experts, top_k = values[op.outputs[0]].shape[0], values[op.inputs[1]].shape[-1]
            found[op.outputs[0]] = Routing(experts, top_k, **groups_of(op))
        elif op.kind not in READERS:
            source = next((found[name] for name in op.inputs if name in found), None)
            if source is not None:
                leading = next(values[name].shape[:ROW_DIMS] for name in op.inputs if name in found)
                same = (name for name in op.outputs if name and values[name].shape[:ROW_DIMS] == leading)
                found.update(dict.fromkeys(same, source))
    return found


def groups_of(op: Op) -> dict[str, int]:
    """Return the attributes of a dispatch, or of its gradient, that say which groups of experts tokens choose."""
    return {name: number for name, number in op.attrs if name in _GROUPS and isinstance(number, int)}
