"""The plan: everything decided, as versioned JSON."""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autopar.errors import PlanError
from autopar.fusion_plan import FusionPlan
from autopar.plan.block_placements import BlockPlan
from autopar.plan.job_info import Job, ModelInfo
from autopar.plan.laws import check_plan, check_variants
from autopar.plan.search_report import Rival, SearchReport
from autopar.plan.stages import AxisUse, StagePlan, Variant
from autopar.plan.step_results import Simulated
from autopar.plan.texts import Exported, Text
from autopar.reading import UnreadableError, check
from autopar.sharding import Axis, Mesh
from autopar.shares import Share, device_ranges, mean_microbatches
from autopar.writing import write_atomically

if TYPE_CHECKING:  # what the methods for notebooks return
    import pandas

    from autopar.ir.graph import Graph
    from autopar.simulate.timeline import Timeline

PLAN_VERSION = 4
"""The newest version that can be read. A plan is of the oldest one that can say what it says: 2 if it has variants or
offloads the optimizer, 3 if it says how it fuses, 4 if rows have different shares: older readers would not see them."""

_HINT = "give the plan.json that `autopar solve -o DIR` wrote"

_OMITTED = (
    "variant",
    "variants",
    "offload",
    "host",
    "host_bytes",
    "rival",
    "remarks",
    "limit",
    "uses",
    "fusion",
    "by_rules",
    "shares",
)
"""Fields that are written only where they are not zero or empty, which older versions take for granted."""


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
        num_microbatches: Microbatches per step, each of `microbatch` samples; of the busiest rows if there are shares.
        blocks: Placements per distinct block; on stages of variant 0 if there are more variants.
        objective: Step time in seconds by the planner's formula; of a plan by degrees, simulated.
        simulated: The simulator's verdict.
        search: How it was found; None on alternatives.
        alternatives: Runners-up in order of simulated time.
        variants: Further meshes with placements of their own, for stages that have other numbers of devices or place
            the same kind of block differently. `StagePlan.variant` says which is whose; `variant_of` resolves it.
        rival: What grid search would have found; None if nobody asked.
        by_rules: What Megatron-LM's documented rules of thumb lead to; None if nobody asked.
        uses: What each mesh axis does, variant by variant; empty in plans written before.
        fusion: Buckets of gradients that differ from the uniform rule, and fused ops; None if there are none.
        shares: Microbatches of each row of the major mesh axis, where rows of unequal devices have different numbers of
            them; empty if all have `num_microbatches`.
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
    by_rules: Rival | None = None
    uses: tuple[tuple[AxisUse, ...], ...] = ()
    fusion: FusionPlan | None = None
    shares: tuple[Share, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        if self.version <= PLAN_VERSION:  # a newer one is refused when it is read
            newest = max((plan.version for plan in self.alternatives), default=1)
            needed = 2 if self.variants or any(stage.offload for stage in self.stages) else 1
            needed = 4 if self.shares else 3 if self.fusion is not None else needed
            object.__setattr__(self, "version", max(newest, needed))

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
    def device_ranges(self) -> tuple[tuple[int, int], ...]:
        """Devices of each group that is simulated apart: those of a stage, share by share of its rows."""
        return device_ranges((stage.devices for stage in self.stages), self.shares)

    @property
    def apart(self) -> "Plan":
        """The plan as it is simulated and shown: its stages once for every share of rows, on the devices of these."""
        if not self.shares:
            return self
        ranges = dict.fromkeys(stage.devices for stage in self.stages)
        numbers = {devices: number for number, devices in enumerate(ranges)}
        own = self.device_ranges
        stages = tuple(
            replace(stage, devices=own[share * len(ranges) + numbers[stage.devices]])
            for share in range(len(self.shares))
            for stage in self.stages
        )
        return replace(self, stages=stages)

    @property
    def microbatch(self) -> int:
        """Samples of one microbatch, over all devices of a stage."""
        return int(self.job.global_batch / self.mean_microbatches)

    @property
    def mean_microbatches(self) -> Fraction:
        """Microbatches per step, on the mean of all rows if these have different shares."""
        return mean_microbatches(self.shares) if self.shares else Fraction(self.num_microbatches)

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
        return replace(self, alternatives=(), search=None, rival=None, by_rules=None)


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
