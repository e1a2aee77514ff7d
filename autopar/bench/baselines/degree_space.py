"""The plans by degrees of a job as a tree of decisions: devices, pipeline, tensor, context and expert degrees, ...

Every path from the root to a leaf is a plan that can be stated (`Degrees` accepts it, the model can be cut into its
stages, its schedule runs its microbatches). Grid search visits all leaves, the other searches some of them. The space
holds every degree there is: all devices, or as few as the job's search looks at, any divisor of their number for pp, tp
and cp, what is left for dp, ep within dp,
every number of microbatches of the planner's space that leaves each device whole samples, every schedule but GPipe,
with up to one block per stage in steps of about 1.5 where stages are interleaved, ZeRO 0 to 3, sequence parallelism,
recompute, and where the job's space has it what lies in host memory. Layers are cut evenly, as whoever states a plan by
degrees does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from autopar.configuration import divisors
from autopar.degrees import Degrees
from autopar.errors import TacticError
from autopar.folding.fold import Folded
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh
from autopar.tactics.draft import Draft
from autopar.tactics.records import ContextParallel, ExpertParallel, Megatron, SequenceParallel, Tactic
from autopar.tactics.stages import even_blocks
from autopar.task import Task

Flow = tuple[str, int]
"""A schedule and the stages per group of devices."""

Value = int | bool | str | Flow
Partial = Mapping[str, Value]
"""Decisions so far by name, in the order of `DECISIONS`."""

DECISIONS = ("gpus", "pp", "tp", "cp", "ep", "microbatch", "flow", "zero", "sequence_parallel", "recompute", "offload")
"""In this order: what comes later only depends on what comes before."""


@dataclass(frozen=True, slots=True)
class Splittable:
    """What of a model can be split.

    Attributes:
        tensor: Whether its layers have pairs of products that tensor parallelism splits.
        sequence: Whether what passes between its blocks has a sequence.
        context: Whether what goes into it has a sequence.
        experts: Experts per layer; 1 if there are none.
    """

    tensor: bool
    sequence: bool
    context: bool
    experts: int


def what_splits(task: Task, folded: Folded) -> Splittable:
    """Return what of a model can be split: each tactic is tried on two devices."""
    samples = task.job.global_batch
    whole_model = Draft(
        folded, task.rules_of(folded), Mesh.of(axis=2), task.costs,
        model=task.workload.info(), job=task.job, batch=task.batch_dims, num_microbatches=samples,
    )  # fmt: skip

    def tried(tactic: Tactic) -> Draft | None:
        draft = whole_model.again(task.job, samples)
        try:
            draft.decide(tactic)
        except TacticError:
            return None
        return draft

    dealt = tried(ExpertParallel("axis"))
    shapes = [(item.value.name, item.value.shape) for item in folded.parameters]
    experts = [
        shape[0]
        for name, shape in shapes
        if dealt is not None and len(shape) == 3 and (decided := dealt.state.split(name, 0)) and decided.dim == 0
    ]
    return Splittable(
        tensor=tried(Megatron("axis")) is not None,
        sequence=tried(SequenceParallel("axis")) is not None,
        context=tried(ContextParallel("axis")) is not None,
        experts=gcd(*experts) if experts else 1,
    )


@dataclass(frozen=True, eq=False)
class DegreeSpace:
    """The plans by degrees of a job.

    Attributes:
        gpus: Number of devices.
        node: Devices of a node.
        global_batch: Samples per step.
        folded: The model at any microbatch size: its chain of blocks is the same at all.
        model: What of the model can be split.
        counts: The numbers of microbatches of the planner's space, ascending.
        trains: Whether there are backward passes.
        flavours: What layers may keep of their forward if there are.
        hosts_optimizer: Whether the optimizer's state may lie in host memory.
        fewer: Smaller numbers of devices that plans may use, descending; the others are left free.
    """

    gpus: int
    node: int
    global_batch: int
    folded: Folded
    model: "Splittable"
    counts: tuple[int, ...]
    trains: bool
    flavours: tuple[Recompute, ...] = ON_DEVICE
    hosts_optimizer: bool = False
    fewer: tuple[int, ...] = ()

    def options(self, partial: Partial) -> tuple[Value, ...]:
        """Return the values the next decision can take; none if the decisions so far lead nowhere."""
        match DECISIONS[len(partial)]:
            case "gpus":
                return self.gpu_counts
            case "pp":
                gpus = whole(partial, "gpus")
                return tuple(pp for pp in divisors(gpus) if self._cuts(pp) and self._spreads(gpus // pp))
            case "tp":
                left = whole(partial, "gpus") // whole(partial, "pp")
                wanted = divisors(left) if self.model.tensor else [1]
                return tuple(tp for tp in wanted if self._spreads(left // tp))
            case "cp":
                left = whole(partial, "gpus") // whole(partial, "pp") // whole(partial, "tp")
                wanted = divisors(left) if self.model.context else [1]
                return tuple(cp for cp in wanted if self._batches(left // cp))
            case "ep":
                cp, experts = whole(partial, "cp"), self.model.experts
                dealt = divisors(gcd(self.data(partial), experts // cp)) if experts % cp == 0 else []
                return tuple(dict.fromkeys((1, *(cp * own for own in dealt))))
            case "microbatch":
                return self._batches(self.data(partial))
            case "flow":
                count = self.global_batch // (self.data(partial) * whole(partial, "microbatch"))
                return self._flows(whole(partial, "pp"), count)
            case "zero":
                copying = self.data(partial) * whole(partial, "cp") > 1
                return (0, 1, 2, 3) if copying and self.trains else (0, 3) if copying else (0,)
            case "sequence_parallel":
                return (False, True) if partial["tp"] != 1 and self.model.sequence else (False,)
            case "recompute":
                return tuple(map(str, self.flavours)) if self.trains else (str(Recompute.NONE),)
            case _:
                return ("", str(Hosted.OPTIMIZER)) if self.trains and self.hosts_optimizer else ("",)

    @cached_property
    def gpu_counts(self) -> tuple[int, ...]:
        """The numbers of devices of its plans, descending."""
        return tuple(gpus for gpus in (self.gpus, *self.fewer) if self.options({"gpus": gpus}))

    def degrees(self, complete: Partial) -> Degrees:
        """Return the plan that decisions come to once all are made."""
        assert len(complete) == len(DECISIONS), "everything is decided"
        flow = complete["flow"]
        assert isinstance(flow, tuple), "a schedule and its stages per group"
        return Degrees(
            dp=self.data(complete),
            tp=whole(complete, "tp"),
            pp=whole(complete, "pp"),
            cp=whole(complete, "cp"),
            ep=whole(complete, "ep"),
            zero=whole(complete, "zero"),
            sequence_parallel=bool(complete["sequence_parallel"]),
            recompute=str(complete["recompute"]),
            offload=str(complete["offload"]),
            schedule=flow[0],
            interleave=flow[1],
            microbatch=whole(complete, "microbatch"),
            global_batch=self.global_batch,
        )

    def leaves(self, partial: Partial | None = None, length: int = len(DECISIONS)) -> Iterator[dict[str, Value]]:
        """Yield all decisions that begin with the given ones: all that are complete, or the first `length` of each."""
        known = dict(partial or {})
        if len(known) == length:
            yield known
            return
        name = DECISIONS[len(known)]
        for value in self.options(known):
            yield from self.leaves({**known, name: value}, length)

    def data(self, partial: Partial) -> int:
        """Return the data-parallel degree: what pipeline, tensor and context parallelism leave."""
        return whole(partial, "gpus") // (whole(partial, "pp") * whole(partial, "tp") * whole(partial, "cp"))

    def _spreads(self, left: int) -> bool:
        """Whether so many devices can be data parallel, or context parallel as far as the batch does not go."""
        degrees = divisors(left) if self.model.context else [left]
        return any(self._batches(dp) for dp in degrees)

    def _batches(self, dp: int) -> tuple[int, ...]:
        """Return the samples of a microbatch on one device, ascending: what the numbers of microbatches leave it."""
        if self.global_batch % dp:
            return ()
        share = self.global_batch // dp
        return tuple(share // count for count in reversed(self.counts) if share % count == 0)

    def _flows(self, pp: int, count: int) -> tuple[Flow, ...]:
        """Return the schedules that run `count` microbatches; GPipe is left out: 1F1B is as fast and holds no more."""
        if not self.trains:
            return (("forward-only", 1),)
        if pp == 1:
            return (("1f1b", 1),)
        most = self.folded.num_blocks // pp
        found: list[Flow] = [("1f1b", 1), *(("1f1b", chunks) for chunks in chunk_counts(most))]
        found += [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]
        return tuple(flow for flow in found if self._runs(flow, pp, count))

    def _runs(self, flow: Flow, pp: int, count: int) -> bool:
        name, chunks = flow
        schedule = SCHEDULES["interleaved" if name == "1f1b" and chunks > 1 else name]
        return self._cuts(pp * chunks) and not schedule.problem(pp, count, chunks)[0]

    def _cuts(self, stages: int) -> bool:
        """Whether the model can be cut evenly into so many stages."""
        if stages not in self._known_cuts:
            try:
                even_blocks(self.folded, stages)
                self._known_cuts[stages] = True
            except TacticError:
                self._known_cuts[stages] = False
        return self._known_cuts[stages]

    @cached_property
    def _known_cuts(self) -> dict[int, bool]:
        return {}


def chunk_counts(most: int) -> list[int]:
    """Return the numbers of stages per group that are tried: 2 to `most`, about one per factor of 1.5.

    >>> chunk_counts(12)
    [2, 3, 4, 6, 8, 12]
    """
    found = []
    for exponent in range(1, most.bit_length()):
        found += [size for size in (2**exponent, 3 * 2 ** (exponent - 1)) if size <= most]
    return found


def whole(partial: Partial, name: str) -> int:
    """Return a decision that is a number."""
    value = partial[name]
    assert isinstance(value, int), name
    return value
