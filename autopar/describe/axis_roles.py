"""The role of each mesh axis of a plan: dp, tp, ep, cp, spatial or idle.

The solver places op by op; a role names what an axis does to most elements. An axis that splits the batch dim of most
activations is data parallel; one that splits most parameters outside experts where they are used is tensor parallel;
one that splits the sequence dim of most activations is context parallel; one that splits height or width of most
activations is spatially parallel; one that splits the experts of a mixture and nothing else is expert parallel. The
batch dim is dim 0 and the sequence dim is dim 1, or dim 0 where the batch is another dim. Any other axis that splits
some of the parameters, or splits or leaves partial most activations, is tensor parallel in part of the model: the head
by the vocabulary, for example, where the weight it shares with an embedding is replicated.

An axis of any role may split experts besides, as frameworks do with data-parallel devices.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from autopar.context_parallelism import ContextKind
from autopar.describe.context_kinds import context_kinds
from autopar.folding.expert_parameters import experts_of
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import states_of
from autopar.ir.fills import fills
from autopar.ir.graph import Op, Phase, Role
from autopar.plan import BlockPlan
from autopar.sharding import Axis, Partial, Placement, Placements, Shard, parse_placements

_SOME = 0.05
"""Share of the parameters that an axis must split to be more than idle."""


def sequence_dim(batch: int) -> int:
    """Return the sequence dim of an activation with this batch dim: the first dim that is not the batch.

    >>> sequence_dim(0), sequence_dim(1), sequence_dim(2)
    (1, 0, 0)
    """
    return 0 if batch else 1


@dataclass(slots=True)
class Tally:
    """Number of elements by how one axis places them."""

    total: float = 0.0
    split: float = 0.0
    batch: float = 0.0
    sequence: float = 0.0
    spatial: float = 0.0
    terms: float = 0.0

    def add(self, placement: Placement, elements: float, rank: int, batch: int = 0) -> None:
        """Count the elements of a tensor of `rank` dims whose batch dim is `batch`."""
        self.total += elements
        if isinstance(placement, Shard):
            sequence = sequence_dim(batch)
            self.split += elements
            self.batch += elements * (placement.dim == batch)
            self.sequence += elements * (placement.dim == sequence)
            self.spatial += elements * (placement.dim >= 2 and placement.dim != batch and rank >= 4)
        self.terms += elements * isinstance(placement, Partial)

    def is_majority(self, part: float) -> bool:
        """Return whether `part` is more than half of the total."""
        return self.total > 0 and part > 0.5 * self.total


@dataclass(slots=True)
class AxisTallies:
    """Tallies of one axis: activations, parameters used and stored, gradient sums, updates and block boundaries."""

    activations: Tally
    used: Tally
    experts: Tally
    stored: Tally
    gradients: Tally
    updates: Tally
    boundaries: Tally

    @classmethod
    def empty(cls) -> "AxisTallies":
        """Return zero tallies."""
        return cls(*(Tally() for _ in range(7)))

    @property
    def role(self) -> str:
        """The role of the axis."""
        if self.activations.is_majority(self.activations.batch):
            return "dp"
        if self.used.is_majority(self.used.split):
            return "tp"
        if self.activations.is_majority(self.activations.sequence):
            return "cp"
        if self.activations.is_majority(self.activations.spatial):
            return "spatial"
        if self.experts.is_majority(self.experts.batch):
            return "ep"
        # All parameters of a stage may be shared with other stages and replicated, with only products split.
        shared = self.activations.split + self.activations.terms
        some = any(tally.split > _SOME * tally.total for tally in (self.used, self.experts))
        return "tp" if some or self.activations.is_majority(shared) else "idle"

    @property
    def zero(self) -> int:
        """The ZeRO stage its sharding of states amounts to (Rajbhandari et al. 2020), 0 to 3."""
        if self.stored.is_majority(self.stored.split):
            return 3
        if self.gradients.is_majority(self.gradients.split):
            return 2
        return 1 if self.updates.is_majority(self.updates.split) else 0


@dataclass(frozen=True, slots=True)
class AxisRole:
    """Role of a mesh axis.

    Attributes:
        axis: The axis.
        role: "dp", "tp", "ep", "cp", "spatial" or "idle".
        zero: ZeRO stage, 0 to 3.
        in_part: Whether it is tensor parallel in less than half of the parameters.
        sequence_parallel: Whether values between blocks are split along the sequence (Korthikanti et al. 2022).
        experts: Whether it splits most expert parameters by expert where they are used.
        context: How most attention gets at positions of other devices of a context-parallel axis; None of others.
    """

    axis: Axis
    role: str
    zero: int
    in_part: bool
    sequence_parallel: bool
    experts: bool
    context: ContextKind | None = None


def expert_degree(roles: Iterable[AxisRole]) -> int:
    """Return the number of devices the experts are divided among."""
    return prod(found.axis.size for found in roles if found.experts)


def roles_of_axes(mesh: Sequence[Axis], blocks: Iterable[BlockPlan], folded: Folded) -> tuple[AxisRole, ...]:
    """Return the role of each mesh axis of a plan.

    Args:
        mesh: The axes.
        blocks: Placements per distinct block.
        folded: The folded graph of one microbatch.
    """
    axes, blocks = [AxisTallies.empty() for _ in mesh], list(blocks)
    for block in blocks:
        _tally(axes, block, folded)
    kinds = context_kinds(mesh, blocks, folded) if any(tallies.role == "cp" for tallies in axes) else {}
    return tuple(
        AxisRole(
            axis,
            tallies.role,
            tallies.zero,
            in_part=not tallies.used.is_majority(tallies.used.split),
            sequence_parallel=tallies.boundaries.is_majority(tallies.boundaries.sequence),
            experts=tallies.experts.is_majority(tallies.experts.batch),
            context=_most(kinds[axis.name]) if tallies.role == "cp" else None,
        )
        for axis, tallies in zip(mesh, axes, strict=True)
    )


def _most(kinds: Counter[ContextKind]) -> ContextKind | None:
    return kinds.most_common(1)[0][0] if kinds else None


def _tally(axes: list[AxisTallies], block: BlockPlan, folded: Folded) -> None:
    graph = folded.graph
    weight = float(len(block.instances))
    states = states_of(folded)
    ops = folded.kinds[block.kind].ops
    activations, experts = activations_of(folded, block.kind), experts_of(folded)
    split_in_use: dict[str, set[int]] = {}

    def add(field: str, name: str, text: str, without: Set[int] = frozenset()) -> None:
        value = graph.values[name]
        for index, (tallies, placement) in enumerate(zip(axes, _parsed(text), strict=True)):
            if index not in without:
                batch = folded.batch_dims.get(name, 0)
                getattr(tallies, field).add(placement, weight * value.size, len(value.shape), batch)

    for op, placed in zip(ops, block.ops, strict=True):
        if op.phase is not Phase.FORWARD:
            continue
        for name, text in zip(op.inputs, placed.inputs, strict=True):
            if not text or name not in states.parameters:
                continue
            split = {index for index, placement in enumerate(_parsed(text)) if isinstance(placement, Shard)}
            split_in_use.setdefault(name, set()).update(split)
            if name in experts:  # nearly all parameters of a mixture, which say nothing of how the others are used
                add("experts", name, text)
            elif len(graph.values[name].shape) > 1:
                add("used", name, text)
    for state in block.states:
        owner = states.owners.get(state.value, state.value)
        add("stored", state.value, state.placement, split_in_use.get(owner, frozenset()))
    for departure in block.departures:
        if departure.value in activations:  # gradients of shared parameters leave blocks as well
            add("boundaries", departure.value, departure.placement)
    for op, placed in zip(ops, block.ops, strict=True):
        for name, text in zip(op.outputs, placed.outputs, strict=True):
            if not name or not text:
                continue
            role = states.written[name].role if name in states.written else None
            if role in (Role.GRADIENT, Role.PARAMETER):
                # A tensor already split in use (tensor parallelism, experts) is not sharded by ZeRO along that axis.
                field = "gradients" if role is Role.GRADIENT else "updates"
                add(field, name, text, split_in_use.get(states.owners[name], frozenset()))
            elif name in activations:
                add("activations", name, text)


def activations_of(folded: Folded, kind: int) -> frozenset[str]:
    """Return the forward values of a kind that depend on data, a dim of which may be the batch."""
    return _activations(folded.pattern, kind)


@lru_cache(maxsize=256)
def _activations(folded: Folded, kind: int) -> frozenset[str]:
    graph, ops = folded.graph, folded.kinds[kind].ops
    derived = _independent_of_data(ops, {state.input for state in graph.states} | graph.constants.keys())
    # Rows of an expert's input are grouped by expert: their dims do not tell the batch.
    derived |= _inside_experts(ops, experts_of(folded), derived) | fills(ops, graph.values).keys()
    made = (name for op in ops if op.phase is Phase.FORWARD for name in op.outputs if name and name not in derived)
    return frozenset(name for name in made if len(graph.values[name].shape) > 1 and graph.values[name].is_float)


def _independent_of_data(ops: Iterable[Op], known: set[str]) -> set[str]:
    """Return the values of a block that depend on no data, such as the transpose of a tied embedding."""
    found = set(known)
    for op in ops:
        if all(name in found for name in op.inputs if name):
            found.update(op.outputs)
    return found


def _inside_experts(ops: Iterable[Op], experts: Set[str], derived: Set[str]) -> set[str]:
    """Return the values of a block that depend on data only through outputs of experts."""
    found: set[str] = set()
    for op in ops:
        data = [name for name in op.inputs if name and name not in derived]
        if not experts.isdisjoint(op.inputs) or (data and all(name in found for name in data)):
            found.update(op.outputs)
    return found


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Placements:
    return parse_placements(text)
