"""Tactics: what a user says about how a model is to be split, one statement at a time.

A schedule is a list of them; order matters, and what an earlier one has decided no later one takes back. All of them
are plain records. What a tactic does is in `apply.py`; all that split something do it by `Shard`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from autopar.context_parallelism import ContextKind
from autopar.ir.graph import Value

Pattern: TypeAlias = str | Callable[[Value], bool]
"""Which values: a name with `*` and `?` as in file names, or a predicate of the value."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Split values along a dim.

    Attributes:
        inputs: Dim by pattern of names: data inputs, parameters, moments (`NAME.m`, `NAME.v`), sums of gradients
            (`NAME.grad`) or any other value. A negative dim counts from the last.
        axis: Name of the mesh axis.
    """

    inputs: Mapping[Pattern, int]
    axis: str


@dataclass(frozen=True, slots=True)
class Replicate:
    """Keep values whole: nothing propagates through them.

    Attributes:
        pattern: Which values.
        axis: Name of the mesh axis; None for all of them.
    """

    pattern: Pattern
    axis: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Place things exactly, on all axes at once, as a plan has them: what no other tactic says.

    Nothing propagates. Names are those of the representative of equal blocks, as in plan.json; there are no patterns.

    Attributes:
        ops: How ops run, by axis, as `autopar rules` prints it: "S(0),R -> S(0) | R,S(1) -> S(1)".
        values: Placements of parameters, and of what passes between blocks: "S(0)R".
        copies: Placements of copies that several ops of a phase share, by `value@kind/phase`; all of them, if any.
    """

    ops: Mapping[str, str]
    values: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Split the batch: every data input along its batch dim."""

    axis: str


@dataclass(frozen=True, slots=True)
class Megatron:
    """Tensor parallelism of Shoeybi et al. (2019): pairs of products, the first by columns and the second by rows.

    The pairs are found from the graph: a parameter whose columns can be split so that what follows stays split until a
    product with another parameter sums it up, in the same block.

    Attributes:
        axis: Name of the mesh axis.
        vocabulary: Whether to split tables that are looked up, and products with them, along the vocabulary.
    """

    axis: str
    vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class SequenceParallel:
    """Split along the sequence what lies between the pairs of `Megatron` (Korthikanti et al., 2022)."""

    axis: str


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Split every data input along its sequence.

    Attributes:
        axis: Name of the mesh axis.
        kind: How attention gets at other positions: "ring" passes keys and values round, and gathers them where no ring
            is known; "gather" gathers them everywhere; "ulysses" exchanges positions for heads.
    """

    axis: str
    kind: ContextKind = "ring"


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Split parameters that hold one matrix per expert along the experts.

    Attributes:
        axis: Name of the mesh axis.
        batch: Whether it splits the batch of everything else, as data parallelism does: tokens are exchanged on their
            way to the experts and back. Else tokens that are whole on the axis stay so.
    """

    axis: str
    batch: bool = True


@dataclass(frozen=True, slots=True)
class ZeRO:
    """Split what data parallelism would keep on every device (Rajbhandari et al., 2020).

    Attributes:
        stage: 1 for moments (and the update), 2 for sums of gradients as well, 3 for parameters as well.
        axis: Name of the mesh axis.
        min_dims: Parameters of fewer dims are left alone.
        pads: Whether a dim that the axis does not divide is padded.
    """

    stage: int
    axis: str
    min_dims: int = 2
    pads: bool = False


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Cut the chain of blocks into stages.

    Attributes:
        stages: Number of groups of devices, which share the layers evenly; or the number of blocks of every stage.
        schedule: A key of `autopar.schedule.SCHEDULES`; None for "1f1b" in training and "forward-only" else.
        microbatches: Microbatches per step; None leaves it as it was.
        chunks: Stages per group of devices, for schedules that give a group several.
    """

    stages: int | tuple[int, ...]
    schedule: str | None = None
    microbatches: int | None = None
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run forwards again in the backward instead of keeping their values.

    Attributes:
        what: "none", "selective" or "full" for the layers, the blocks that repeat, or "offload" to keep their values in
            host memory instead; for the stages named also runs of blocks, "full*4 none*2".
        stages: Which stages; None for all.
    """

    what: str = "full"
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Offload:
    """Keep something in host memory between steps.

    Attributes:
        what: A key of `autopar.recompute.STATE_KINDS`: "optimizer", the state of the optimizer (moments and master
            copies), "update", "gradients" or "parameters"; "optimizer=0.5" for a share of it, the first blocks of each
            stage; for the stages named also runs of blocks, "optimizer*4 none*2".
        stages: Which stages; None for all.
    """

    what: str = "optimizer"
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Automatic:
    """Let a solver decide what is still open.

    Attributes:
        axes: Names of the mesh axes it may use.
        objective: "time", the only one there is: seconds of a step by the planner's formula.
        time_limit: Seconds; None for no limit.
        method: A solver's name, or "mcts" for the tree search over tactics that PartIR has.
        seed: Of the tree search.
    """

    axes: tuple[str, ...]
    objective: str = "time"
    time_limit: float | None = None
    method: str = "auto"
    seed: int = 0


Tactic: TypeAlias = (
    Shard
    | Replicate
    | Place
    | DataParallel
    | Megatron
    | SequenceParallel
    | ContextParallel
    | ExpertParallel
    | ZeRO
    | Pipeline
    | Recompute
    | Offload
    | Automatic
)
"""Any tactic."""
