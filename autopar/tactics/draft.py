"""A plan in the making: tactics are applied one after the other, and each says what it added."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, product

from autopar.cost import CostModel
from autopar.discover import Rules
from autopar.errors import JobError, PlanError, TacticError
from autopar.folding.fold import Folded
from autopar.folding.selective_recompute import selective_ops
from autopar.formulate.step_time import Pipeline as Flow
from autopar.plan import BlockPlan, Job, ModelInfo, Plan, StagePlan
from autopar.program.lower import lower
from autopar.recompute import (
    FLAVOURS,
    first_share,
    format_hosted,
    format_recompute,
    parse_hosted,
    parse_recompute,
    parse_share,
    share_of,
)
from autopar.recompute import Recompute as Flavour
from autopar.schedule import SCHEDULES, usual_schedule
from autopar.sharding import Mesh
from autopar.simulate import Timeline, simulate
from autopar.tactics.apply import Applier, Outcome, Refused, Splitting
from autopar.tactics.automatic import complete
from autopar.tactics.count import Traffic, traffic
from autopar.tactics.propagate import Conflict
from autopar.tactics.reasons import Unsplit, unsplit
from autopar.tactics.records import (
    Automatic,
    DataParallel,
    Megatron,
    Offload,
    Pipeline,
    Recompute,
    SequenceParallel,
    Tactic,
    ZeRO,
)
from autopar.tactics.stages import even_blocks, layers, moment_elements
from autopar.tactics.state import State, Topology
from autopar.tactics.tree import TreeSearch
from autopar.tactics.write import Writer

TREE_SEARCH = "mcts"
"""In place of a solver's name."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a tactic did.

    Attributes:
        tactic: The tactic.
        traffic: All collectives asked for so far, this tactic's included, of all trips.
        seconds: Simulated time of a step, of all trips.
        peak_bytes: Bytes on the fullest device.
        split: Values it split, with mesh axis and dim, those that propagation reached included.
        conflicts: Decisions that did not go together.
        refused: Values it asked for that it could not split.
        unsplit: Parameters that still lie whole on every device, and why.
    """

    tactic: Tactic
    traffic: tuple[Traffic, ...]
    seconds: float
    peak_bytes: float
    split: tuple[tuple[str, str, int], ...]
    conflicts: tuple[Conflict, ...]
    refused: tuple[Refused, ...]
    unsplit: tuple[Unsplit, ...]


class Draft:
    """A plan in the making.

    Attributes:
        state: Where values lie.
        applier: What applies tactics to it.
        steps: What has been applied.
    """

    def __init__(
        self,
        folded: Folded,
        rules: Rules,
        mesh: Mesh,
        costs: CostModel,
        *,
        model: ModelInfo,
        job: Job,
        batch: Mapping[str, int],
        num_microbatches: int,
        trips: int = 1,
    ) -> None:
        """Start with everything replicated on one stage.

        Args:
            folded: The graph of one microbatch.
            rules: What its ops can do.
            mesh: The devices of one stage.
            costs: What things cost.
            model: What the plan records of the model.
            job: What it records of the request.
            batch: The batch dim of every value that has one.
            num_microbatches: Microbatches per step.
            trips: How often a loop around the model runs it; steps are reported for all of them.

        Raises:
            TacticError: If a training step is to run in a loop.
        """
        if trips < 1 or (trips > 1 and job.mode == "train"):
            raise TacticError(f"{trips} trips through the model in mode {job.mode}", hint="loops are for --mode infer")
        self.folded, self.rules, self.costs, self.model, self.job = folded, rules, costs, model, job
        self.num_microbatches, self.trips = num_microbatches, trips
        self.state = State(Topology(folded, rules, mesh, uneven=costs.stack.uneven))
        self.applier = Applier(self.state, batch)
        self._schedule = usual_schedule(job.mode)
        self._blocks: tuple[int, ...] = (folded.num_blocks,)  # per stage
        self._chunks = 1
        self._recompute: dict[int | None, str] = {None: "none"}
        self._offload: dict[int | None, str] = {None: ""}
        self._selective = {
            kind.id: tuple(kind.ops[position].name for position in sorted(positions))
            for kind, positions in zip(folded.kinds, selective_ops(folded, costs), strict=True)
        }
        self._number = 0  # of the next tactic
        self._written: tuple[BlockPlan, ...] | None = None  # the placements, while they stay as they are
        self.steps: list[Step] = []

    def again(self, job: Job, num_microbatches: int) -> "Draft":
        """Return a draft with the same placements so far, on one stage, for another request."""
        other = copy(self)
        other.state = self.state.copy()
        other.applier = self.applier.of(other.state)
        other.job, other.num_microbatches, other.steps = job, num_microbatches, list(self.steps)
        other._recompute, other._offload = {None: "none"}, {None: ""}
        other._blocks, other._chunks = (self.folded.num_blocks,), 1
        return other

    def apply(self, tactic: Tactic) -> Step:
        """Apply a tactic and return what it did.

        Raises:
            TacticError: If it cannot be applied; nothing has changed then.
        """
        before = {(name, axis) for name, axes in self.state.splits.items() for axis in axes}
        outcome = self.decide(tactic)
        axes = [axis.name for axis in self.state.topology.mesh.axes]
        split = tuple(
            (name, axes[axis], decided.dim)
            for name, found in self.state.splits.items()
            for axis, decided in found.items()
            if (name, axis) not in before and decided.dim >= 0
        )
        writer = Writer(self.state)
        timeline = self._simulated(writer)
        step = Step(
            tactic,
            tuple(
                replace(item, count=item.count * self.trips, bytes=item.bytes * self.trips)
                for item in traffic(writer, self.costs.policy)
            ),
            timeline.step_seconds * self.trips,
            timeline.peak_bytes,
            split,
            outcome.conflicts,
            outcome.refused,
            unsplit(self.state),
        )
        self.steps.append(step)
        return step

    def decide(self, tactic: Tactic) -> Outcome:
        """Apply a tactic without a look at what it adds.

        Raises:
            TacticError: If it cannot be applied; nothing has changed then.
        """
        outcome = Outcome((), ())
        match tactic:
            case Pipeline():
                self._cut(tactic)
            case Recompute():
                self._recompute_stages(tactic)
            case Offload():
                self._offload_stages(tactic)
            case Automatic():
                self._complete(tactic)
                self._written = None
            case _:
                self._written = None
                outcome = self.applier.apply(tactic, self._number)
        self._number += 1
        return outcome

    def _complete(self, tactic: Automatic) -> None:
        """Let a solver decide what is open: of the completions it finds good, the fastest that fits is taken."""
        if tactic.objective != "time":
            raise TacticError(f"objective {tactic.objective!r}", hint="the only one is time")
        axes = frozenset(self.applier.axis(name) for name in tactic.axes)
        if tactic.method == TREE_SEARCH:
            limit = self.job.memory_limit
            search = TreeSearch(self.state, axes, self._number, self._merit, limit, tactic.seed)
            self.state.take(search.run(tactic.time_limit))
            return
        best, least = self.state.copy(), self._merit(self.state)
        found = complete(
            self.state,
            self.rules,
            self.costs,
            axes,
            flow=Flow(len(self._blocks), self.num_microbatches, self._schedule),
            global_batch=self.job.global_batch,
            memory_limit=self.job.memory_limit,
            solver=tactic.method,
            time_limit=tactic.time_limit,
            tactic=self._number,
        )
        for state in chain(found, self._by_hand(tactic.axes)):
            merit = self._merit(state)
            if merit < least:
                best, least = state, merit
        self.state.take(best)

    def _by_hand(self, axes: Sequence[str]) -> Iterator[State]:
        """Yield what people would do by hand with the axes: each for data or for Megatron, with and without ZeRO."""
        for roles in product((DataParallel, Megatron), repeat=len(axes)):
            data = [axis for axis, role in zip(axes, roles, strict=True) if role is DataParallel]
            tensor = [axis for axis, role in zip(axes, roles, strict=True) if role is Megatron]
            for stage, sequence in product(range(4) if data else (0,), (False, True) if tensor else (False,)):
                schedule: list[Splitting] = [DataParallel(axis) for axis in data]
                schedule += [Megatron(axis) for axis in tensor]
                schedule += [SequenceParallel(axis) for axis in tensor if sequence]
                schedule += [ZeRO(stage, axis) for axis in data if stage]
                state = self.state.copy()
                applier = self.applier.of(state)
                for tactic in schedule:
                    with suppress(TacticError):  # the model has nothing left that this could split
                        applier.apply(tactic, self._number)
                yield state

    def _merit(self, state: State) -> tuple[float, float]:
        """Return how many bytes too many a state needs, then its simulated seconds; less is better."""
        timeline = self._simulated(Writer(state))
        return max(0.0, timeline.peak_bytes - self.job.memory_limit), timeline.step_seconds

    def _simulated(self, writer: Writer) -> Timeline:
        return simulate(lower(self._plan(self._blocks_of(writer)), self.folded, self.costs), self.costs)

    def plan(self) -> Plan:
        """Return the plan as it stands."""
        if self._written is None:
            self._written = self._blocks_of(Writer(self.state))
        return self._plan(self._written)

    def _blocks_of(self, writer: Writer) -> tuple[BlockPlan, ...]:
        return tuple(replace(block, selective=self._selective[block.kind]) for block in writer.blocks())

    def _plan(self, blocks: tuple[BlockPlan, ...]) -> Plan:
        return Plan(
            model=self.model,
            job=self.job,
            summary="",
            mesh=self.state.topology.mesh.axes,
            stages=self._stages(),
            schedule=self._schedule,
            num_microbatches=self.num_microbatches,
            blocks=blocks,
            objective=0.0,
        )

    def _stages(self) -> tuple[StagePlan, ...]:
        size = self.state.topology.mesh.size
        groups = SCHEDULES[self._schedule].groups(len(self._blocks) // self._chunks, self._chunks)
        stages, first = [], 0
        for index, (count, group) in enumerate(zip(self._blocks, groups, strict=True)):
            what = self._recompute.get(index, self._recompute[None])
            recompute = self._of_layers(what, first, count) if what in set(Flavour) else what
            devices, offload = (group * size, (group + 1) * size), self._offload.get(index, self._offload[None])
            if "=" in offload:
                offload = self._of_first_blocks(offload, first, count)
            stages.append(StagePlan((first, first + count), devices, recompute, offload=offload))
            first += count
        return tuple(stages)

    def _of_layers(self, what: str, first: int, count: int) -> str:
        """Return what the blocks of a stage recompute if its layers do so, and what surrounds them nothing."""
        own = set(layers(self.folded))
        return format_recompute(
            tuple(Flavour(what) if block in own else Flavour.NONE for block in range(first, first + count))
        )

    def _of_first_blocks(self, offload: str, first: int, count: int) -> str:
        """Return which blocks of a stage offload a share of its state, parameters counting for it."""
        chain, sizes = self.folded.chain, moment_elements(self.folded)
        away = first_share([sizes[chain[block]] for block in range(first, first + count)], parse_share(offload))
        return format_hosted(away, share_of(offload))

    def _cut(self, tactic: Pipeline) -> None:
        schedule = tactic.schedule or usual_schedule(self.job.mode)
        if schedule not in SCHEDULES:
            raise TacticError(f"there is no schedule {schedule!r}", hint=f"there are {', '.join(SCHEDULES)}")
        if SCHEDULES[schedule].trains != (self.job.mode == "train"):
            raise TacticError(f"schedule {schedule} does not go with mode {self.job.mode}", hint="leave it out")
        groups = num_groups(tactic)
        why, hint = SCHEDULES[schedule].problem(groups, self.num_microbatches, tactic.chunks)
        if why:
            raise TacticError(f"schedule {schedule} {why}", hint=hint)
        if tactic.microbatches not in (None, self.num_microbatches):
            raise TacticError(
                f"{tactic.microbatches} microbatches, after {self.num_microbatches} were settled",
                hint="say it once, in the last Pipeline of the schedule",
            )
        blocks, total = tactic.stages, self.folded.num_blocks
        if isinstance(blocks, int):
            blocks = even_blocks(self.folded, groups * tactic.chunks)
        elif min(blocks) < 1 or sum(blocks) != total:
            raise TacticError(
                f"stages of {', '.join(map(str, blocks))} blocks do not make the {total} blocks of the model",
                hint="give a number of stages, or sizes that add up",
            )
        told = (*self._recompute, *self._offload)
        beyond = [stage for stage in told if stage is not None and stage >= len(blocks)]
        if beyond:
            raise TacticError(
                f"{len(blocks)} stages, after stage {beyond[0]} was told what to recompute or offload",
                hint="say what stages recompute or offload after the Pipeline",
            )
        self._schedule, self._blocks, self._chunks = schedule, blocks, tactic.chunks

    def _recompute_stages(self, tactic: Recompute) -> None:
        if self.job.mode != "train":
            raise TacticError("without a backward pass nothing runs again", hint="leave Recompute out")
        self._check_stages(tactic.stages)
        if tactic.what not in set(Flavour):
            if tactic.stages is None:
                raise TacticError(
                    f"recompute {tactic.what!r}", hint=f"it is {FLAVOURS}; of a stage also runs of blocks"
                )
            for stage in tactic.stages:
                try:
                    parse_recompute(tactic.what, self._blocks[stage])
                except PlanError as error:
                    raise TacticError(f"stage {stage}: {error.args[0]}", hint=error.hint) from None
        for index in (None,) if tactic.stages is None else tactic.stages:
            self._recompute[index] = tactic.what

    def _offload_stages(self, tactic: Offload) -> None:
        if self.job.mode != "train":
            raise TacticError("without an update there is no optimizer", hint="leave Offload out")
        self._check_stages(tactic.stages)
        try:
            if tactic.stages is None or "*" not in tactic.what:
                parse_share(tactic.what or "nothing")
            else:
                for stage in tactic.stages:
                    parse_hosted(tactic.what, self._blocks[stage])
        except (JobError, PlanError) as error:
            raise TacticError(error.args[0], hint=error.hint) from None
        for index in (None,) if tactic.stages is None else tactic.stages:
            self._offload[index] = tactic.what

    def _check_stages(self, stages: Sequence[int] | None) -> None:
        count = len(self._blocks)
        for stage in stages or ():
            if not 0 <= stage < count:
                raise TacticError(f"there is no stage {stage}", hint=f"stages are 0 to {count - 1}")


def num_groups(tactic: Pipeline) -> int:
    """Return the number of groups of devices of a pipeline.

    Raises:
        TacticError: If there is none, or stages cannot be dealt to groups equally.
    """
    if tactic.chunks < 1:
        raise TacticError(f"a pipeline of {tactic.chunks} chunks", hint="every group of devices has at least one")
    stages = tactic.stages * tactic.chunks if isinstance(tactic.stages, int) else len(tactic.stages)
    if stages < 1:
        raise TacticError("a pipeline without stages", hint="give a number of stages, or the blocks of every stage")
    if stages % tactic.chunks:
        raise TacticError(f"{stages} stages in chunks of {tactic.chunks}", hint="give every group equally many")
    return stages // tactic.chunks
