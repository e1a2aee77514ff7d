"""From a plan to a program: every kind of block lowered once (`block.py`), then put together stage by stage."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.cost import CostModel, DtypePolicy, Resharder
from autopar.cost.reshard import bucketed
from autopar.errors import PlanError
from autopar.folding.block_interface import HandOver, hand_overs, instance_names
from autopar.folding.fold import Folded
from autopar.folding.graph_facts import dealt_lengths, element_bytes
from autopar.fusion_plan import OpGroup
from autopar.plan import BlockPlan, Plan, StagePlan, Variant, check_variants
from autopar.program.block import HINT, BlockLowering, LoweredKind, Reshards
from autopar.program.buckets import with_buckets
from autopar.program.crossings import find_crossings
from autopar.program.hosted import hosted_bytes, shared_parameters, streams
from autopar.program.kinds import program_kind
from autopar.program.op_groups import stated
from autopar.program.records import (
    HOST_PHASES,
    OPTIMIZER_STATE,
    STATE_COPIES,
    Category,
    Program,
    Resident,
    SegmentPhase,
    StageProgram,
)
from autopar.recompute import STATE_KINDS, Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh


def lower(plan: Plan, folded: Folded, costs: CostModel) -> Program:
    """Return the program of a plan.

    Args:
        plan: What to do.
        folded: The folded graph of one microbatch of the plan.
        costs: Decides between several ways to change a placement.

    Raises:
        PlanError: If the plan does not fit the graph.
    """
    for variant in plan.all_variants:
        _check_mesh(variant)
    check_variants(plan)
    if plan.schedule not in SCHEDULES:
        raise PlanError(f"there is no schedule {plan.schedule!r}", hint=f"known are {', '.join(SCHEDULES)}")
    for group in () if plan.fusion is None else plan.fusion.groups:
        if not (0 <= group.variant < len(plan.all_variants) and 0 <= group.kind < len(folded.kinds)):
            raise PlanError(
                f"the kernel of {', '.join(group.ops)} is in blocks of kind {group.kind} of variant {group.variant}; "
                f"the model has {len(folded.kinds)} kinds, the plan {len(plan.all_variants)} variants",
                hint="`autopar fuse PLAN --fusion joint -o DIR` finds groups",
            )
    flavours = [stage.flavours for stage in plan.stages]
    lowered: dict[int, LoweredKind] = {}
    for number, variant in enumerate(plan.all_variants):
        used = {kind for stage in plan.stages if stage.variant == number for kind in _kinds(stage, folded)}
        blocks = [block for block in variant.blocks if block.kind in used or not plan.variants]
        groups = {} if plan.fusion is None else {kind: plan.fusion.groups_of(number, kind) for kind in used}
        found = lower_blocks(
            blocks,
            folded,
            Resharder(variant.device_mesh, costs, dealt_lengths(folded)),
            used,
            splits=SCHEDULES[plan.schedule].splits,
            groups=groups,
        )
        lowered |= {program_kind(folded, number, kind): block for kind, block in found.items()}
    chain = [program_kind(folded, stage.variant, kind) for stage in plan.stages for kind in _kinds(stage, folded)]
    what, wanted = _hosted_state(plan), _wanted(plan, flavours, folded)
    in_common = shared_parameters(lowered.values())
    segments = tuple(
        replace(segment, kind=kind) if segment.kind != kind else segment
        for kind, block in lowered.items()
        for segment in (*block.segments, *streams(block, what, in_common))
        if kind in wanted.get(segment.phase, lowered)
    )
    stages, shared = [], copies([lowered[kind] for kind in chain], folded) if len(chain) == len(folded.chain) else []
    for index, stage in enumerate(plan.stages):
        kinds = tuple(program_kind(folded, stage.variant, kind) for kind in _kinds(stage, folded))
        totals, hosted, copied = dict[Category, float](), dict[Category, float](), 0.0
        away = stage.hosted
        for kind, is_away in zip(kinds, away, strict=True):
            gone = hosted_bytes(lowered[kind], what, in_common) if is_away else {}
            for category, amount in lowered[kind].resident.items():
                totals[category] = totals.get(category, 0.0) + amount - gone.get(category, 0.0)
            for category, amount in gone.items():
                hosted[category] = hosted.get(category, 0.0) + amount
        here = [other for other in plan.stages if other.devices == stage.devices]
        for copy in shared:
            owned = any(copy.owner in range(*other.blocks) for other in here)
            size = copy.on(range(*stage.blocks))
            if size and not owned:
                for category, amount in ((Category.PARAMETERS, size), *copy.state):
                    there = hosted if all(away) and category in OPTIMIZER_STATE else totals
                    there[category] = there.get(category, 0.0) + amount
                    copied += amount if there is hosted else 0.0
        if folded.buffer_bytes and stage.devices not in {earlier.devices for earlier in plan.stages[:index]}:
            totals[Category.BUFFERS] = folded.buffer_bytes
        resident = tuple(
            Resident(category, amount) for category, amount in totals.items() if amount or category not in hosted
        )
        elsewhere = _on_host(hosted) if any(away) else ()
        mesh = plan.variant_of(stage).device_mesh
        stages.append(
            StageProgram(
                index,
                stage.devices,
                mesh,
                kinds,
                flavours[index],
                resident,
                stage.variant,
                elsewhere,
                away if len(set(away)) > 1 else (),
                hosted_copies=copied,
                what=what,
            )
        )
    program = Program(tuple(stages), segments, plan.schedule, plan.num_microbatches, shares=plan.shares)
    program = with_buckets(program, plan.fusion)
    return replace(program, crossings=find_crossings(program, folded, costs.cluster))


def _kinds(stage: StagePlan, folded: Folded) -> tuple[int, ...]:
    """Return the kinds of the blocks of a stage."""
    return folded.chain[stage.blocks[0] : stage.blocks[1]]


def _on_host(hosted: Mapping[Category, float]) -> tuple[Resident, ...]:
    """Return bytes in host memory by category; what the optimizer makes in its update counts as its state."""
    state = sum(hosted.get(category, 0.0) for category in OPTIMIZER_STATE)
    others = ((category, amount) for category, amount in hosted.items() if category not in OPTIMIZER_STATE)
    return tuple(Resident(category, amount) for category, amount in ((Category.OPTIMIZER, state), *others))


def _hosted_state(plan: Plan) -> Hosted:
    """Return what of the state of blocks lies in host memory.

    Raises:
        PlanError: If stages differ in it.
    """
    found = sorted({stage.hosted_state for stage in plan.stages if stage.offload})
    if len(found) > 1:
        raise PlanError(
            f"stages have {' and '.join(found)} in host memory", hint="let all stages offload one kind of state"
        )
    return found[0] if found else Hosted.OPTIMIZER


def _wanted(plan: Plan, flavours: Sequence[Sequence[Recompute]], folded: Folded) -> dict[SegmentPhase, frozenset[int]]:
    """Return which kinds of blocks need the segments that not every plan runs.

    Raises:
        PlanError: If a stage is to offload something that there is not.
    """
    trains = SCHEDULES[plan.schedule].trains
    found: dict[SegmentPhase, set[int]] = {phase: set() for phase in (SegmentPhase.AGAIN, *HOST_PHASES)}
    for index, (stage, each) in enumerate(zip(plan.stages, flavours, strict=True)):
        kinds = (program_kind(folded, stage.variant, kind) for kind in _kinds(stage, folded))
        if not trains and (stage.offload or Recompute.OFFLOAD in each):
            raise PlanError(f"stage {index} offloads, but nothing is trained", hint="offload nothing")
        for kind, flavour, is_away in zip(kinds, each, stage.hosted, strict=False):
            if flavour is Recompute.SELECTIVE:
                found[SegmentPhase.AGAIN].add(kind)
            elif flavour is Recompute.OFFLOAD:
                found[SegmentPhase.OFFLOAD].add(kind)
                found[SegmentPhase.FETCH].add(kind)
            if is_away:
                for phase in (phase for pair in STATE_COPIES.items() for phase in pair):
                    found[phase].add(kind)
                if flavour is Recompute.OFFLOAD and STATE_KINDS[stage.hosted_state].sums:
                    raise PlanError(
                        f"stage {index} has {stage.hosted_state} and activations of a block in host memory",
                        hint="they would pass over the link together: offload one of them",
                    )
    return {phase: frozenset(kinds) for phase, kinds in found.items()}


@lru_cache(maxsize=16)  # a search lowers many plans of one graph
def _known(
    folded: Folded, policy: DtypePolicy
) -> tuple[Mapping[int, HandOver], tuple[Mapping[str, float], Mapping[str, float]]]:
    """Return what lowering needs to know of a graph whatever the plan."""
    return hand_overs(folded), element_bytes(folded, policy)


@dataclass(frozen=True, slots=True)
class Copy:
    """A parameter that blocks read which do not own it (tied embeddings); a stage without its owner has a copy of it.

    Attributes:
        owner: The block that owns it.
        readers: The blocks that read it, with the bytes per device they would have a copy of. Its gradient travels to
            the owner.
        state: Bytes per device of its gradient and its optimizer's state, by category. A stage with a copy has them,
            too: in Megatron-LM either end of a pipeline sums gradients and updates its own copy.
    """

    owner: int
    readers: tuple[tuple[int, float], ...]
    state: tuple[tuple[Category, float], ...] = ()

    @property
    def state_bytes(self) -> float:
        """Bytes of its gradient and its optimizer's state."""
        return sum(amount for _, amount in self.state)

    def on(self, blocks: range) -> float:
        """Return the bytes of the copy on a stage that does not own it; 0 if none of its blocks reads it."""
        return max((size for block, size in self.readers if block in blocks), default=0.0)


@lru_cache(maxsize=64)
def _places(folded: Folded, name: str) -> tuple[tuple[int, str], ...]:
    """Return the blocks that have a value of the model, each with the name it has in the representative."""
    every = enumerate(instance_names(folded))
    return tuple((block, local) for block, known in every for local, own in known.items() if own == name)


def copies(blocks: Sequence[LoweredKind], folded: Folded) -> list[Copy]:
    """Return the parameters that blocks share, given all blocks of the chain as they are lowered."""
    if not any(block.borrowed for block in blocks):
        return []
    names = instance_names(folded)
    readers: dict[str, list[tuple[int, float]]] = {}
    for block, lowered in enumerate(blocks):
        for name, size in lowered.borrowed.items():
            readers.setdefault(names[block].get(name, name), []).append((block, size))
    owners = {
        name: (block, tuple(blocks[block].owned[local].items()))
        for name in readers
        for block, local in _places(folded.pattern, name)
        if local in blocks[block].owned
    }
    return [Copy(owners[name][0], tuple(found), owners[name][1]) for name, found in readers.items() if name in owners]


def lower_blocks(
    blocks: Sequence[BlockPlan],
    folded: Folded,
    resharder: Resharder,
    wanted: Collection[int] | None = None,
    *,
    splits: bool = False,
    known: Mapping[BlockPlan, LoweredKind] | None = None,
    groups: Mapping[int, Sequence[OpGroup]] | None = None,
) -> dict[int, LoweredKind]:
    """Return the kinds of blocks lowered, with what selective recompute would run again.

    Args:
        blocks: What to do.
        folded: The folded graph of one microbatch.
        resharder: Changes placements on the mesh of the plan.
        wanted: Kinds that have to be there; all of the graph by default.
        splits: Whether the schedule splits the backward.
        known: Blocks of the same graph that were lowered before, on the same mesh and with as many passes.
        groups: Kernels that the plan states, by kind.

    Raises:
        PlanError: If the blocks do not fit the graph.
    """
    costs = resharder.cost
    assert isinstance(costs, CostModel), "what travels in buckets is told apart here"
    handed, sizes = _known(folded, costs.policy)
    reshards = Reshards(resharder, bucketed(resharder.mesh, costs, resharder.dealt))
    lowered = {}
    before = known or {}
    for block in blocks:
        if not 0 <= block.kind < len(folded.kinds):
            raise PlanError(f"the plan has a block kind {block.kind}, the model has {len(folded.kinds)}", hint=HINT)
        found = before.get(block)
        if found is None:
            kernels = stated((groups or {}).get(block.kind, ()), folded.kinds[block.kind].ops)
            found = BlockLowering(block, folded, handed[block.kind], reshards, costs, sizes, splits, kernels).run()
        lowered[block.kind] = found
    missing = set(folded.chain if wanted is None else wanted) - lowered.keys()
    if missing:
        raise PlanError(f"the plan says nothing about blocks of kind {min(missing)}", hint=HINT)
    return lowered


def _check_mesh(variant: Variant) -> None:
    """Check that a mesh has devices, in order."""
    if variant.device_mesh != Mesh.of(**{axis.name: axis.size for axis in variant.mesh}):
        raise PlanError(f"the strides of mesh {variant.device_mesh} are not those of its sizes", hint=HINT)
