"""The plan: everything decided, as versioned JSON.

Placements are stored as the text they print as, one placement per mesh axis ("S(0)R"), so that a plan file can be read
and edited by hand.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from autopar.errors import PlanError
from autopar.fusion_plan import FusionPlan
from autopar.plan_laws import check_plan
from autopar.reading import UnreadableError, check
from autopar.recompute import Recompute, parse_recompute
from autopar.sharding import Axis, Mesh

if TYPE_CHECKING:  # what the methods for notebooks return
    import pandas

    from autopar.ir.graph import Graph
    from autopar.simulate.timeline import Timeline

PLAN_VERSION = 3
"""The newest version that can be read. A plan is of the oldest one that can say what it says: 2 if it has variants or
offloads the optimizer, 3 if it says how it fuses, which older readers would not see."""

OFFLOADS = ("", "optimizer")
"""What a stage can keep in host memory between steps, by `StagePlan.offload`."""

ContextKind = Literal["ring", "gather", "ulysses"]
"""How attention gets at positions of a sequence that other devices hold: keys and values go round in a ring; every
device gathers them whole; or all devices exchange positions for heads (DeepSpeed-Ulysses)."""
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)

_HINT = "give the plan.json that `autopar solve -o DIR` wrote"

_OMITTED = ("variant", "variants", "offload", "host", "host_bytes", "rival", "remarks", "limit", "uses", "fusion")
"""Fields that are written only where they are not zero or empty, which older versions take for granted."""


DimSize = int | float | tuple[int, ...]
"""What a dynamic dim, or a field of a zoo model's configuration, is set to; only fields are fractions or tuples."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Which model a plan is for.

    Attributes:
        name: Name of the model.
        source: File path or `zoo:NAME`, as the user gave it.
        sha256: Hash of the model file; for zoo models of the serialised graph.
        num_parameters: Elements of all parameters; weights of a few bits count one each, their scales nothing.
        dims: Dynamic dims, or fields of a zoo model's configuration, that were set by the user.
        tokens: Tokens of one sample; 0 if the model does not read tokens.
        trained: Elements of the parameters that are not frozen; 0 if none is.
    """

    name: str
    source: str
    sha256: str
    num_parameters: int
    dims: tuple[tuple[str, DimSize], ...] = ()
    tokens: int = 0
    trained: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for.

    Attributes:
        mode: "train" (forward, loss, backward, update) or "infer" (forward).
        gpus: Number of devices.
        global_batch: Samples per step.
        memory_limit: Bytes per device that a plan may use.
        cluster: Description of the cluster, as `autopar.cluster` writes it.
        loss: Loss of the training step.
        optimizer: Optimizer of the training step.
        stack: Software stack, as `autopar.cost.stack` writes it; empty for the default one.
        precision: What is stored in which precision, a key of `autopar.cost.POLICIES`.
        pins: What the user pinned or forbade, as a file of pins has it.
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it; plans that do not
            say were made so. True where nothing is normalised over the batch.
        lora: Adapters that are trained in place of the model, as `--lora` takes them; "" without.
    """

    mode: str
    gpus: int
    global_batch: int
    memory_limit: float
    cluster: Mapping[str, Any]
    loss: str = "auto"
    optimizer: str = "adam"
    stack: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "mixed"
    pins: Mapping[str, Any] = field(default_factory=dict)
    sync_batchnorm: bool = True
    lora: str = ""


@dataclass(frozen=True, slots=True)
class DividedNumber:
    """A number inside an op that is smaller on a shard: an entry of a Reshape's target shape, the `group` of a Conv.

    Attributes:
        source: Index of the constant input that holds the number, or the name of an attribute.
        entry: Position in that tensor or list; 0 for a scalar.
        divisor: What it is divided by: the sizes of the mesh axes that split it, multiplied.
    """

    source: int | str
    entry: int
    divisor: int


@dataclass(frozen=True, slots=True)
class ReplacedNumber:
    """A number in an attribute that is another one on a shard: the padding of a convolution that has a halo."""

    attr: str
    entry: int
    value: int


@dataclass(frozen=True, slots=True)
class HaloRows:
    """Rows of the neighbouring devices that are put around a device's block of an input.

    Attributes:
        input: Index of the input.
        dim: Tensor dim, split over `axis` and no other.
        axis: Name of the mesh axis.
        before: Rows of the previous device.
        after: Rows of the next device.
        fill: "zero" or "lowest" (minus infinity), at the ends of the tensor.
    """

    input: int
    dim: int
    axis: str
    before: int
    after: int
    fill: str = "zero"


@dataclass(frozen=True, slots=True)
class LocalKind:
    """Another op that a device runs in place of an op, told where its block starts.

    Attributes:
        kind: Its kind; it has one more input than the op, where the device's block starts, and one more attribute,
            `size`, the number of rows of the whole tensor along `dim`.
        input: Index of the sharded input.
        dim: Tensor dim of it whose first row's position the op is told.
        axes: Names of the mesh axes that split it and for which the other op is needed, major first.
    """

    kind: str
    input: int
    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpPlacement:
    """How one op runs on the devices of a stage.

    Attributes:
        op: Its name in the representative block.
        inputs: Placements per input, data and constants included; "" for an absent one.
        outputs: Placements per output; "" for an unwanted one.
        divided: Numbers inside the op that one device's op has divided.
        replaced: Numbers in its attributes that are other ones on one device.
        halos: Rows of neighbours around blocks of inputs.
        local: What a device runs in place of the op; None if the op itself.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    divided: tuple[DividedNumber, ...] = ()
    replaced: tuple[ReplacedNumber, ...] = ()
    halos: tuple[HaloRows, ...] = ()
    local: LocalKind | None = None


@dataclass(frozen=True, slots=True)
class ValuePlacement:
    """Placement of a persistent tensor, or of the copy of a value that several ops share."""

    value: str
    placement: str


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Decisions for one distinct block; every instance of the block follows its representative, op by op.

    Attributes:
        kind: Id of the distinct block.
        representative: Index of the instance whose op and value names are used.
        instances: Indices of all instances in the chain of blocks.
        ops: Placements per op.
        states: Placements of the block's parameters between steps.
        borrowed: Placements of parameters of other blocks that this one reads (tied embeddings).
        arrivals: Values that come from other blocks, as this block receives them.
        departures: Values that go to other blocks, as they leave this one.
        copies: Copies that several ops of a phase share, named `value@kind/phase`.
        selective: Names of the ops that run again in an instance that recomputes selectively; what they make is not
            kept.
    """

    kind: int
    representative: int
    instances: tuple[int, ...]
    ops: tuple[OpPlacement, ...]
    states: tuple[ValuePlacement, ...]
    borrowed: tuple[ValuePlacement, ...] = ()
    arrivals: tuple[ValuePlacement, ...] = ()
    departures: tuple[ValuePlacement, ...] = ()
    copies: tuple[ValuePlacement, ...] = ()
    selective: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A pipeline stage.

    Attributes:
        blocks: Half-open range in the chain of blocks.
        devices: Half-open range of device numbers. Stages may take turns as the schedule says: with p different
            ranges, interleaved stage i has those of stage i - p, and of 2p stages in the shape of a V stages i and
            2p - 1 - i have the same.
        recompute: "none", "selective" (the ops that `BlockPlan.selective` names run again) or "full" (only block
            inputs are kept, the forward runs again) for all its blocks, or "offload" (what is kept lies in host memory
            between the passes); or runs of blocks, "full*4 none*2".
        variant: Which mesh and placements it has: 0 for `Plan.mesh` and `Plan.blocks`, i > 0 for
            `Plan.variants[i - 1]`.
        offload: What lies in host memory between steps: "" for nothing, "optimizer" for the state of the optimizer
            (moments and master copies), which passes over the host link in the update.
    """

    blocks: tuple[int, int]
    devices: tuple[int, int]
    recompute: str
    variant: int = 0
    offload: str = ""

    @property
    def flavours(self) -> tuple[Recompute, ...]:
        """What each of its blocks keeps.

        Raises:
            PlanError: If `recompute` does not say.
        """
        return parse_recompute(self.recompute, self.blocks[1] - self.blocks[0])


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What a mesh axis does to most of what it could split.

    Attributes:
        role: "dp", "tp", "ep", "cp", "spatial" or "idle" (`autopar.describe.axis_roles`).
        zero: The level of ZeRO it amounts to, 0 to 3.
    """

    role: str
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """A mesh, and how blocks lie on it: what some stages of a plan have in common and others do not.

    Attributes:
        mesh: Devices of one stage.
        blocks: Placements per distinct block; at least of the kinds that stages of the variant have. `instances` of a
            block are all those in the chain, whatever stage they are on.
    """

    mesh: tuple[Axis, ...]
    blocks: tuple[BlockPlan, ...]

    @property
    def device_mesh(self) -> Mesh:
        """The mesh of one stage."""
        return Mesh(self.mesh)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory per device of one stage.

    Attributes:
        peak: Peak bytes.
        breakdown: The same by category.
        host: Bytes of a device in the memory of its host.
        limit: Bytes a device of the stage may use; 0 for the job's limit, which holds but for groups of nodes that have
            more memory than others.
    """

    peak: float
    breakdown: Mapping[str, float]
    host: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class PartTimes:
    """A part of the step by the planner's formula and as simulated, in seconds.

    Attributes:
        name: "passes" (of all microbatches through the busiest stage), "waits" (for other stages) or "end" (what
            follows the last pass: gradients, gathers, the update).
        formula: By the formula; the parts add up to the objective.
        simulated: Simulated; the parts add up to the step.
    """

    name: str
    formula: float
    simulated: float


@dataclass(frozen=True, slots=True)
class Remark:
    """What the reader of a prediction should know before believing it.

    Attributes:
        kind: "fit" (it does not), "memory", "mfu", "cost" (ops of guessed cost), "idle", "calibration", "choice" (among
            plans that are equally fast as far as can be told) or "request" (an option without effect).
        text: A sentence.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the event simulator found for the lowered plan; seconds and bytes.

    Attributes:
        step_seconds: Duration of one step.
        compute_seconds: Busy time of the busiest stage.
        exposed_seconds: Communication inside stages that nothing hides, of the same stage.
        gradient_seconds: Gradient reduction that the backward pass does not hide.
        bubble_seconds: Idle time of that stage.
        mfu: Model FLOPs (no recompute) over peak FLOPs of all devices in one step.
        stages: Memory per stage.
        host_bytes: What lies in the memory of the fullest host.
        parts: Where the step of the busiest stage goes, in the field's words; they add up to the step.
        against: Parts of the step by the formula and simulated, of plans that were searched for.
        error: Mean absolute error of the software stack's calibration, as a share of the step; None if uncalibrated.
        remarks: What is unusual about these figures (`autopar.remarks`).
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    gradient_seconds: float
    bubble_seconds: float
    mfu: float
    stages: tuple[StageMemory, ...]
    host_bytes: float = 0.0
    parts: tuple[tuple[str, float], ...] = ()
    error: float | None = None
    against: tuple[PartTimes, ...] = ()
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Wall time of one phase of the search, and the process's peak memory at its end.

    With workers it has what each of them took at most besides; pages that several share count for each.
    """

    name: str
    seconds: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """What was known at some time of a search.

    Attributes:
        seconds: Since the search was asked for, import and discovery included.
        objective: Of the best plan so far, in seconds; a history begins with the first.
        bound: No plan of the space has a lower objective, as far as was proven then, in seconds.
    """

    seconds: float
    objective: float
    bound: float


@dataclass(frozen=True, slots=True)
class SearchReport:
    """How the plan was found.

    Attributes:
        solver: Name of the solver of the placement problems.
        termination: "optimal" (gap proven to be within tolerance), "exhausted" (whole space searched, gap left),
            "time limit" or "interrupted".
        objective: Best objective in seconds.
        bound: No plan of the declared space has a lower objective, in seconds.
        space: The declared space, in words.
        configurations: Number of (pipeline degree, mesh, microbatches) combinations in it.
        solved: How many of them were solved.
        pruned: How many were excluded by their bound.
        phases: Where the time went.
        history: What was known when; seconds ascend, objectives never rise, bounds never fall.
        complete: No plan that is not akin to one of the best few has a lower objective, in seconds; 0 if unknown.
        cut: Placement problems that were cut by their limit of work, or of time.
        cached: Whether the answer was found before and kept; all else is of the search that found it.
    """

    solver: str
    termination: str
    objective: float
    bound: float
    space: tuple[str, ...]
    configurations: int
    solved: int
    pruned: int
    phases: tuple[PhaseTime, ...]
    history: tuple[HistoryPoint, ...] = ()
    complete: float = 0.0
    cut: int = 0
    cached: bool = False

    @property
    def least(self) -> float:
        """The least objective found, in seconds: the plan's own, or less where the simulator ranks others first."""
        return min([self.objective, *(point.objective for point in self.history[-1:])])

    @property
    def gap(self) -> float:
        """How much lower than the objective the optimum can be, relative to the objective."""
        return max(0.0, 1.0 - self.bound / self.objective) if self.objective > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Rival:
    """What another way to search would have found, at the same costs and in the same simulator.

    Attributes:
        method: The way, in words.
        space: What it searched, in words.
        summary: Its best plan in one line; "" if none of its plans fits.
        step_seconds: Of that plan, simulated; None without one.
        peak_bytes: On the fullest device, simulated; None without one.
        tried: Plans that were priced.
        plans: Plans of its space.
        stopped: "" if it ended by itself, else "time limit" or "interrupted".
        seconds: How long it took.
    """

    method: str
    space: str
    summary: str
    step_seconds: float | None
    peak_bytes: float | None
    tried: int
    plans: int
    stopped: str
    seconds: float


class Text(str):
    """Text that an interactive session shows as it is, not as a quoted string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in the words of a framework.

    Attributes:
        name: Name of the file, if the caller has none.
        data: Its content.
        lost: What of the plan the framework cannot be told, a sentence each.
        granted: What the prediction takes for granted and the file does not ask for, a sentence each.
        outcome: What the file comes to when it is read back and predicted; empty for placements.
    """

    name: str
    data: bytes
    lost: tuple[str, ...]
    granted: tuple[str, ...] = ()
    outcome: str = ""

    @property
    def text(self) -> str:
        """The content as text."""
        return self.data.decode()


@dataclass(frozen=True, slots=True)
class Plan:
    """A parallelisation of one model on one cluster.

    Attributes:
        model: The model.
        job: The request.
        summary: The plan in one line, in the field's words.
        mesh: Devices of one stage; of the stages of variant 0 if there are more variants.
        stages: Pipeline stages in order.
        schedule: A key of `autopar.schedule.SCHEDULES`: "1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v",
            "forward-only".
        num_microbatches: Microbatches per step; each holds `global_batch / num_microbatches` samples.
        blocks: Placements per distinct block; on stages of variant 0 if there are more variants.
        objective: Step time in seconds by the planner's formula; of a plan by degrees, simulated.
        simulated: The simulator's verdict.
        search: How it was found; None on alternatives.
        alternatives: Runners-up in order of simulated time.
        variants: Further meshes with placements of their own, for stages that have other numbers of devices or place
            the same kind of block differently. `StagePlan.variant` says which is whose; `variant_of` resolves it.
        rival: What grid search would have found; None if nobody asked.
        uses: What each mesh axis does, variant by variant; empty in plans written before.
        fusion: Buckets of gradients that differ from the uniform rule, and fused ops; None if there are none.
        version: Version of the format; the oldest that can say what the plan says.
    """

    model: ModelInfo
    job: Job
    summary: str
    mesh: tuple[Axis, ...]
    stages: tuple[StagePlan, ...]
    schedule: str
    num_microbatches: int
    blocks: tuple[BlockPlan, ...]
    objective: float
    simulated: Simulated | None = None
    search: SearchReport | None = None
    alternatives: tuple["Plan", ...] = field(default=())
    variants: tuple[Variant, ...] = ()
    rival: Rival | None = None
    uses: tuple[tuple[AxisUse, ...], ...] = ()
    fusion: FusionPlan | None = None
    version: int = 1

    def __post_init__(self) -> None:
        if self.version <= PLAN_VERSION:  # a newer one is refused when it is read
            newest = max((plan.version for plan in self.alternatives), default=1)
            needed = 2 if self.variants or any(stage.offload for stage in self.stages) else 1
            object.__setattr__(self, "version", max(newest, 3 if self.fusion is not None else needed))

    @property
    def device_mesh(self) -> Mesh:
        """The mesh of one stage; of the stages of variant 0 if there are more variants."""
        return Mesh(self.mesh)

    @property
    def all_variants(self) -> tuple[Variant, ...]:
        """Meshes with their placements, in the numbering of `StagePlan.variant`."""
        return (Variant(self.mesh, self.blocks), *self.variants)

    def variant_of(self, stage: StagePlan) -> Variant:
        """Return the mesh and the placements of a stage."""
        return Variant(self.mesh, self.blocks) if stage.variant == 0 else self.variants[stage.variant - 1]

    def of_variant(self, number: int) -> "Plan":
        """Return what the stages of a variant do as a plan of one variant: those stages, its mesh and their blocks."""
        variant = self.all_variants[number]
        stages = tuple(replace(stage, variant=0) for stage in self.stages if stage.variant == number)
        held = {block for stage in stages for block in range(*stage.blocks)}
        blocks = tuple(
            replace(block, instances=tuple(index for index in block.instances if index in held))
            for block in variant.blocks
            if not held.isdisjoint(block.instances)
        )
        uses = self.uses[number : number + 1]
        fusion = None if self.fusion is None else self.fusion.of_stages(self.numbers_of(number)).of_variant(number)
        return replace(self, mesh=variant.mesh, blocks=blocks, stages=stages, variants=(), uses=uses, fusion=fusion)

    def numbers_of(self, variant: int) -> tuple[int, ...]:
        """Return the numbers of the stages of a variant."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.variant == variant)

    def stage_of(self, block: int) -> StagePlan:
        """Return the stage that has a block of the chain."""
        return next(stage for stage in self.stages if block in range(*stage.blocks))

    def block_plan(self, block: int) -> BlockPlan:
        """Return the placements of a block of the chain, on the stage that has it."""
        return next(plan for plan in self.variant_of(self.stage_of(block)).blocks if block in plan.instances)

    @property
    def stage_limits(self) -> tuple[float, ...]:
        """Bytes that a device of each simulated stage may use."""
        stages = self.simulated.stages if self.simulated is not None else ()
        return tuple(stage.limit or self.job.memory_limit for stage in stages)

    @property
    def microbatch(self) -> int:
        """Samples of one microbatch, over all devices of a stage."""
        return self.job.global_batch // self.num_microbatches

    def to_json(self) -> bytes:
        """Return the plan as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(_written(msgspec.to_builtins(self))), indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan atomically."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def from_json(cls, data: bytes) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: If the data is no plan of a known version, or its parts do not agree; the message names the
                field, or what does not.
        """
        try:
            plan = msgspec.json.decode(data, type=cls)
            if b"\\" in data or not data.isascii():  # only then can a text have control characters
                check(msgspec.json.decode(data))
        except RecursionError:
            raise PlanError("not a plan: it is nested too deeply", hint=_HINT) from None
        except (msgspec.DecodeError, UnicodeDecodeError, UnreadableError) as error:
            raise PlanError(f"not a plan: {error}", hint=_HINT) from None
        if not 1 <= plan.version <= PLAN_VERSION:
            raise PlanError(
                f"plan of version {plan.version}, this autopar reads 1 to {PLAN_VERSION}", hint="solve the model again"
            )
        check_plan(plan)
        check_variants(plan)
        return plan

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file.

        Args:
            path: The file, or the folder whose `plan.json` it is, as `-o DIR` leaves it.

        Raises:
            PlanError: If the file cannot be read or is no plan.
        """
        file = Path(path) / "plan.json" if Path(path).is_dir() else Path(path)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise PlanError(f"cannot read plan {str(file)!r}: {error.strerror}", hint="check the path") from None
        return cls.from_json(data)

    def export(self, to: str, *, model: str | Path | None = None, cache_dir: str | Path | None = None) -> Exported:
        """Return the plan in the words of a framework; see `autopar.frameworks.export`."""
        exported: Exported = import_module("autopar.frameworks").export(self, to, model=model, cache_dir=cache_dir)
        return exported

    def explain(self, *, ops: bool = False) -> "Text":
        """Return the explanation of the plan, which a notebook shows as text; see `autopar.report.format_explain`."""
        return Text(import_module("autopar.report").format_explain(self, ops=ops))

    def graph(self, *, model: str | Path | None = None, cache_dir: str | Path | None = None) -> "Graph":
        """Return what one microbatch of the plan computes, on one device; the whole step in training.

        `Graph.to_networkx` has it for the algorithms of networkx.
        """
        workload = import_module("autopar.workload").open_plan(self, model, cache_dir=cache_dir)
        graph: Graph = workload.folded(self.microbatch).graph
        return graph

    def program(self, *, model: str | Path | None = None, cache_dir: str | Path | None = None) -> "Text":
        """Return the distributed program of the plan as text, which `autopar.simulate_program` reads from a file."""
        return Text(import_module("autopar.api").program_text(self, model=model, cache_dir=cache_dir))

    def timeline(self, *, model: str | Path | None = None, cache_dir: str | Path | None = None) -> "Timeline":
        """Return one simulated step with its bars and memory over time; see `autopar.simulate_plan`."""
        timeline: Timeline = import_module("autopar.api").simulate_plan(self, model=model, cache_dir=cache_dir)
        return timeline

    def to_dataframe(
        self, what: str = "stages", *, model: str | Path | None = None, cache_dir: str | Path | None = None
    ) -> "pandas.DataFrame":
        """Return a part of the plan as a table; see `autopar.report.notebook.to_dataframe`."""
        tables = import_module("autopar.report.notebook")
        frame: pandas.DataFrame = tables.to_dataframe(self, what, model=model, cache_dir=cache_dir)
        return frame

    def _repr_html_(self) -> str:
        """Return what a notebook shows of the plan."""
        html: str = import_module("autopar.report.notebook").to_html(self)
        return html

    def without_alternatives(self) -> "Plan":
        """Return the plan alone, as it stands in another plan's list of alternatives."""
        return replace(self, alternatives=(), search=None, rival=None)


def check_variants(plan: Plan) -> None:
    """Check that every stage has a mesh of its size, and placements of all its blocks.

    Raises:
        PlanError: If a stage has none, or a variant no stage.
    """
    hint = "the plan was edited: solve again"
    variants = plan.all_variants
    kinds = {index: block.kind for variant in variants for block in variant.blocks for index in block.instances}
    for number, stage in enumerate(plan.stages):
        if not 0 <= stage.variant < len(variants):
            raise PlanError(f"stage {number} has variant {stage.variant}, the plan has {len(variants)}", hint=hint)
        variant = variants[stage.variant]
        devices = stage.devices[1] - stage.devices[0]
        if devices != variant.device_mesh.size:
            raise PlanError(
                f"stage {number} has {devices} devices, the mesh {variant.device_mesh} of its variant "
                f"{stage.variant} has {variant.device_mesh.size}",
                hint=hint,
            )
        placed = {block.kind for block in variant.blocks}
        missing = {kinds[block] for block in range(*stage.blocks) if block in kinds} - placed
        if missing:
            raise PlanError(
                f"stage {number} has blocks of kind {min(missing)}, which its variant {stage.variant} does not place",
                hint=hint,
            )
        others = {other.variant for other in plan.stages if other.devices == stage.devices}
        if len(others) > 1:
            raise PlanError(
                f"stage {number} has other placements than a stage it takes turns with on devices {stage.devices}",
                hint="give stages on the same devices the same variant",
            )
    unused = set(range(len(variants))) - {stage.variant for stage in plan.stages}
    if unused:
        raise PlanError(f"no stage has variant {min(unused)} of the plan", hint="number the variants without gaps")


def _written(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan as it is written, without what older versions take for granted."""
    simulated = plan["simulated"] or {"stages": ()}
    for record in (plan, *plan["stages"], simulated, *simulated["stages"]):
        for name in _OMITTED:
            if not record.get(name, True):
                del record[name]
    if plan["job"]["sync_batchnorm"]:
        del plan["job"]["sync_batchnorm"]
    for record, name in ((plan["job"], "lora"), (plan["model"], "trained")):
        if not record[name]:
            del record[name]
    for other in plan["alternatives"]:
        _written(other)
    return plan


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new, never half of it.

    Raises:
        PlanError: If the folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PlanError(f"cannot write {str(path)!r}: {error.strerror}", hint="choose another folder with -o") from None
