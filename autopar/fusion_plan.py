"""How a plan fuses: which gradients travel in one collective, and which ops run in one kernel.

Records only. `autopar.fusion` finds them, lowering checks them against the program, the simulator times them.
"""

from dataclasses import dataclass, replace

OFF, BUCKETS, JOINT = "off", "buckets", "joint"
FUSIONS = (OFF, BUCKETS, JOINT)
"""What a search fuses beyond the rules of the stack: nothing, gradients in buckets cut for each plan, or ops, too."""

USUAL_ALPHA, USUAL_BETA = 1.05, 10
"""Of the search for kernels: those of DisCo (Yi et al., TPDS 2022)."""

STEP, MICROBATCH = "step", "microbatch"
"""When gradients travel: once per step, or once per microbatch (ZeRO-2 and 3)."""


@dataclass(frozen=True, slots=True)
class BucketCuts:
    """Where the gradients of a stage that one collective reduces over one mesh axis are cut into buckets.

    Gradients are numbered in the order in which the backward pass makes them.

    Attributes:
        collective: The collective, e.g. "all_reduce".
        axis: Name of the mesh axis.
        per: "step" or "microbatch".
        hops: Collectives that these gradients have behind them: 1 where a sum over another axis came before, else 0.
        ends: One past the last gradient of each bucket, ascending.
    """

    collective: str
    axis: str
    per: str
    hops: int
    ends: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells the gradients from those of other cuts of the stage."""
        return self.collective, self.axis, self.per, self.hops

    @property
    def title(self) -> str:
        """The gradients in words."""
        behind = f", after {self.hops} other collective{'s' if self.hops > 1 else ''}" if self.hops else ""
        return f"{self.collective} over {self.axis!r} per {self.per}{behind}"

    def fault(self) -> str:
        """Return what is wrong with the cuts whatever they cut; "" if nothing is."""
        if self.per not in (STEP, MICROBATCH):
            return f"gradients of {self.title}: they travel per {STEP} or per {MICROBATCH}"
        if self.hops < 0:
            return f"gradients of {self.collective} over {self.axis!r} have {self.hops} collectives behind them"
        if not self.ends:
            return f"gradients of {self.title} are cut into no buckets"
        before = 0
        for number, end in enumerate(self.ends):
            if end <= before:
                behind = f"bucket {number - 1} ends at {before}" if number else "the first gradient is 0"
                return f"bucket {number} of {self.title} is out of order: it ends at gradient {end}, {behind}"
            before = end
        return ""


@dataclass(frozen=True, slots=True)
class StageBuckets:
    """Buckets that some stages have in common.

    Attributes:
        stages: Numbers of the stages.
        cuts: Their cuts, one for each collective, axis and time; gradients without cuts travel by the uniform rule.
    """

    stages: tuple[int, ...]
    cuts: tuple[BucketCuts, ...]


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Ops of a kind of block that run in one kernel.

    Attributes:
        kind: Id of the distinct block.
        ops: Names of the ops in its representative, in order.
        again: Names of ops whose results the kernel computes for itself, though they have a kernel elsewhere, too.
        variant: Variant of the plan that places the block.
    """

    kind: int
    ops: tuple[str, ...]
    again: tuple[str, ...] = ()
    variant: int = 0


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """How a plan fuses.

    Attributes:
        buckets: Cuts of gradients into buckets, by stage. A stage that is not named follows the uniform rule.
        groups: Kernels of several ops. Kinds of blocks that are not named are fused as the stack does.
    """

    buckets: tuple[StageBuckets, ...] = ()
    groups: tuple[OpGroup, ...] = ()

    def groups_of(self, variant: int, kind: int) -> tuple[OpGroup, ...]:
        """Return the groups of a kind of block."""
        return tuple(group for group in self.groups if (group.variant, group.kind) == (variant, kind))

    def cuts_of(self, stage: int) -> tuple[BucketCuts, ...]:
        """Return the cuts of a stage."""
        return next((each.cuts for each in self.buckets if stage in each.stages), ())

    def of_stages(self, numbers: tuple[int, ...]) -> "FusionPlan":
        """Return what is said of some stages, which get new numbers in their order."""
        renumbered = {old: new for new, old in enumerate(numbers)}
        kept = (
            replace(each, stages=tuple(renumbered[stage] for stage in each.stages if stage in renumbered))
            for each in self.buckets
        )
        return replace(self, buckets=tuple(each for each in kept if each.stages))

    def of_variant(self, variant: int) -> "FusionPlan":
        """Return what is said of the blocks of a variant, which becomes the only one."""
        groups = (replace(group, variant=0) for group in self.groups if group.variant == variant)
        return replace(self, groups=tuple(groups))

    @classmethod
    def of_cuts(cls, cuts: tuple[tuple[BucketCuts, ...], ...]) -> "FusionPlan":
        """Return the plan with the cuts of every stage; stages with equal cuts are one entry."""
        stages: dict[tuple[BucketCuts, ...], list[int]] = {}
        for number, own in enumerate(cuts):
            if own:
                stages.setdefault(own, []).append(number)
        return cls(tuple(StageBuckets(tuple(numbers), own) for own, numbers in stages.items()))

    def faults(self, num_stages: int) -> list[str]:
        """Return what is wrong with the plan whatever its model."""
        found = [fault for each in self.buckets for cuts in each.cuts if (fault := cuts.fault())]
        named = [stage for each in self.buckets for stage in each.stages]
        found += [f"buckets of stage {stage}, of {num_stages}" for stage in named if not 0 <= stage < num_stages]
        found += [f"buckets of stage {stage} twice" for stage in sorted(set(named)) if named.count(stage) > 1]
        for each in self.buckets:
            keys = [cuts.key for cuts in each.cuts]
            found += [f"cuts of {cuts.title} twice" for cuts in each.cuts if keys.count(cuts.key) > 1]
        return found
