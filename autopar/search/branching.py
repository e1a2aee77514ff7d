"""Branching for the k best plans: branches that together cover all plans with another signature than a given plan.

A no-good cut on a signature is a disjunction: another plan has another schedule, more recompute, or another role of a
mesh axis. Each *branch* is a restriction of tables, constraints or schedules, so that a branch is solved like a node.

A branch applies to all tensors. Without data parallelism on an axis, no activation is split along the batch on that
axis; with ZeRO-1, every parameter that can be split has that level. Mixed plans (an axis that splits some activations
along the batch, ZeRO on every other parameter) count as akin to the nearest pure plan (`Signature.is_akin_to`).
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from autopar.configuration import Family
from autopar.describe.axis_roles import AxisRole, activations_of, sequence_dim
from autopar.describe.signature import ZERO_ROLES
from autopar.folding.expert_parameters import experts_of
from autopar.folding.fold import Folded
from autopar.formulate.constraints import Constraints
from autopar.formulate.data_major import is_data_major
from autopar.formulate.manual_recipes import placed_on
from autopar.formulate.restrict import Mask, narrow
from autopar.formulate.tables import Decision, Node, Tables
from autopar.formulate.zero import LEVELS, keep_levels
from autopar.ir.graph import Phase, Role
from autopar.recompute import BY_SECONDS, ON_DEVICE, Recompute
from autopar.schedule import SCHEDULES
from autopar.search.candidate import Candidate, draft_of


@dataclass(frozen=True, slots=True, order=True)
class MoreRecompute:
    """Every repeated block recomputes more than the flavour `than` does."""

    than: str


@dataclass(frozen=True, slots=True, order=True)
class SequenceSplit:
    """An axis splits the values between blocks along the sequence dim: all that it can split, or none."""

    axis: int
    split: bool


@dataclass(frozen=True, slots=True, order=True)
class ZeroLevels:
    """Every parameter that some axes can split has one of the given ZeRO levels on each of these axes."""

    axes: tuple[int, ...]
    levels: frozenset[int]


@dataclass(frozen=True, slots=True, order=True)
class WithoutRole:
    """An axis does not have a role: no op does on it what defines the role."""

    axis: int
    role: str


@dataclass(frozen=True, slots=True, order=True)
class WithRole:
    """An axis has a role: every op that can does on it what defines the role."""

    axis: int
    role: str


Branch = MoreRecompute | SequenceSplit | ZeroLevels | WithoutRole | WithRole

ROLES = ("dp", "tp", "ep", "cp", "spatial")
"""Roles that an idle axis can take."""


@dataclass(frozen=True, slots=True)
class Branches:
    """Branches of a family that exclude one of its plans.

    Attributes:
        others: Configurations with another schedule.
        branches: Restrictions, for any schedule of the family.
    """

    others: Family
    branches: tuple[Branch, ...]


def branches_of(candidate: Candidate, family: Family, folded: Folded) -> Branches:
    """Return the branches that cover all plans of a family but those akin to a given plan.

    Args:
        candidate: The plan.
        family: Configurations that differ from its own in the schedule only.
        folded: The graph of one of its microbatches.
    """
    draft = candidate.draft or draft_of(candidate)
    own, mesh = draft.signature, candidate.configuration.mesh
    others = tuple(each for each in family if own.schedule and each.schedule != own.schedule)
    trains = SCHEDULES[candidate.configuration.schedule].trains
    axes = [(axis, role) for axis, role in enumerate(draft.roles) if role.axis.size > 1]
    found: list[Branch] = (
        list(_level_branches(axes)) if trains else []
    )  # branches that change the step time least come first
    found += [SequenceSplit(axis, not role.sequence_parallel) for axis, role in axes if role.role == "tp"]
    if trains and Recompute(own.recompute) in ON_DEVICE[:-1]:
        found.append(MoreRecompute(own.recompute))
    free = [(axis, role) for axis, role in axes if axis > 0 or not is_data_major(mesh)]
    found += [WithoutRole(axis, role.role) for axis, role in free if role.role != "idle"]
    found += [WithRole(axis, name) for axis, role in free if role.role == "idle" for name in ROLES]
    if experts_of(folded):  # experts may also be split by an axis that has another role
        others_too = [(axis, role.experts) for axis, role in free if role.role not in ("ep", "idle")]
        found += [WithoutRole(axis, "ep") if deals else WithRole(axis, "ep") for axis, deals in others_too]
    return Branches(others, tuple(found))


def _level_branches(axes: Sequence[tuple[int, AxisRole]]) -> Iterator[Branch]:
    """Yield the branches with another highest ZeRO level of a role: lower on all of its axes, or higher on one."""
    for name in sorted(ZERO_ROLES):
        own = {axis: role.zero for axis, role in axes if role.role == name}
        highest = max(own.values(), default=0)
        if own and highest:
            yield ZeroLevels(tuple(own), frozenset(range(highest)))
        if higher := LEVELS - frozenset(range(highest + 1)):
            yield from (ZeroLevels((axis,), higher) for axis in own)


def apply(branches: tuple[Branch, ...], tables: Tables, constraints: Constraints) -> tuple[Tables, Constraints] | None:
    """Return the tables and constraints restricted to branches; None if they exclude every plan."""
    masks: dict[int, Mask] = {}
    for branch in branches:
        match branch:
            case MoreRecompute():
                constraints = _restrict_recompute(branch, tables.folded, constraints)
                if any(own.isdisjoint(constraints.flavours()) for own in constraints.keeps):
                    return None
            case SequenceSplit():
                _intersect(masks, _sequence_masks(branch, tables))
            case WithoutRole():
                _intersect(masks, ((index, ~doing) for index, doing in _role_masks(branch, tables)))
            case WithRole():
                able = [(index, doing) for index, doing in _role_masks(branch, tables) if doing.any()]
                if not able:
                    return None
                _intersect(masks, iter(able))
            case ZeroLevels():
                pass  # applied after the masks, to the strategies that remain
    narrowed = narrow(tables, masks)
    if narrowed is None:
        return None
    for branch in branches:
        if isinstance(branch, ZeroLevels):
            for axis in branch.axes:
                narrowed = keep_levels(narrowed, branch.levels, axis)
    return narrowed, constraints


def _intersect(masks: dict[int, Mask], more: Iterator[tuple[int, Mask]]) -> None:
    for index, mask in more:
        masks[index] = masks[index] & mask if index in masks else mask


def _restrict_recompute(branch: MoreRecompute, folded: Folded, constraints: Constraints) -> Constraints:
    counts = [kind.count for kind in folded.kinds]
    repeated = max(counts) > 1
    more = frozenset((*ON_DEVICE[ON_DEVICE.index(Recompute(branch.than)) + 1 :], Recompute.OFFLOAD))
    keeps = constraints.keeps or (frozenset(BY_SECONDS),) * len(folded.chain)
    left = (
        own & more if counts[kind] > 1 or not repeated else own for own, kind in zip(keeps, folded.chain, strict=True)
    )
    return replace(constraints, keeps=tuple(left))


def _sequence_masks(branch: SequenceSplit, tables: Tables) -> Iterator[tuple[int, Mask]]:
    for index, node in enumerate(tables.nodes):
        if node.decision is Decision.BOUNDARY:
            ((name, codes, _),) = placed_on(tables, node, branch.axis)
            split = codes == _SPLIT + sequence_dim(tables.folded.batch_dims.get(name, 0))
            if not branch.split:
                yield index, ~split
            elif split.any():
                yield index, split


_SPLIT = 2
"""Code of a split along dim 0; the code of a split along dim d is `_SPLIT + d`."""


def _role_masks(branch: WithoutRole | WithRole, tables: Tables) -> Iterator[tuple[int, Mask]]:
    """Yield, per forward op, a mask of the strategies in which the axis of a branch does what defines its role."""
    graph = tables.folded.graph
    parameters = {state.input for state in graph.states if state.role is Role.PARAMETER}
    activations = {kind.id: activations_of(tables.folded, kind.id) for kind in tables.folded.kinds}
    for index, node in enumerate(tables.nodes):
        if node.decision is Decision.OP:
            op = tables.folded.kinds[node.kind].ops[node.position]
            if op.phase is Phase.FORWARD:
                yield index, _role_mask(branch, tables, node, parameters, activations[node.kind])


def _role_mask(
    branch: WithoutRole | WithRole, tables: Tables, node: Node, parameters: set[str], activations: Set[str]
) -> Mask:
    values = tables.folded.graph.values
    mask = np.zeros(node.count, dtype=bool)
    for name, codes, is_output in placed_on(tables, node, branch.axis):
        rank = len(values[name].shape)
        made, used = is_output and name in activations, not is_output and name in parameters
        batch = tables.folded.batch_dims.get(name, 0)
        match branch.role:
            case "dp" if made:
                mask |= codes == _SPLIT + batch
            case "cp" if made:
                mask |= codes == _SPLIT + sequence_dim(batch)
            case "spatial" if made and rank >= 4:
                mask |= (codes >= _SPLIT + 2) & (codes != _SPLIT + batch)
            case "tp" if used and rank > 1:
                mask |= codes >= _SPLIT
            case "ep" if used and name in experts_of(tables.folded):
                mask |= codes == _SPLIT
            case _:
                pass
    return mask
