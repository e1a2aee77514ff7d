"""Laws of plans that are read from files: numbers in range, and parts that agree with each other.

What can be checked without the model is checked here, once, when a plan is read; `autopar.formulate.agreement`
holds it against the model. So whoever works on a plan from a file may take for granted that its lists are as long as
they have to be.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from autopar.errors import PlanError, ShardingError
from autopar.limits import MAX_BATCH, MAX_DEVICES, MAX_MICROBATCHES
from autopar.plan.block_placements import BlockPlan
from autopar.plan.stages import Variant
from autopar.plan.step_results import Simulated
from autopar.sharding import Mesh, parse_placements
from autopar.shares import faults as share_faults
from autopar.shares import num_rows, row_microbatches

if TYPE_CHECKING:
    from autopar.plan.records import Plan

_ROUNDING = 1e-9
"""Seconds that rounding may leave of a difference that is nothing."""
_HINT = "the plan was edited: solve again"


def check_plan(plan: "Plan") -> None:
    """Check a plan and its runners-up.

    Raises:
        PlanError: If a number is out of range, or parts of the plan do not agree; the message says which.
    """
    for each, where in ((plan, ""), *((other, "an alternative: ") for other in plan.alternatives)):
        fault = next(_faults(each), None)
        if fault is not None:
            raise PlanError(f"not a plan: {where}{fault}", hint=_HINT)


def check_variants(plan: "Plan") -> None:
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


def _faults(plan: "Plan") -> Iterator[str]:
    """Yield what is wrong with a plan, whatever its model."""
    job = plan.job
    for name, number, least, most in (
        ("job.gpus", job.gpus, 1, MAX_DEVICES),
        ("job.global_batch", job.global_batch, 1, MAX_BATCH),
        ("num_microbatches", plan.num_microbatches, 1, MAX_MICROBATCHES),
        ("model.num_parameters", plan.model.num_parameters, 0, None),
        ("model.tokens", plan.model.tokens, 0, None),
    ):
        if number < least or (most is not None and number > most):
            yield f"{name} is {number}, out of its range from {least}{'' if most is None else f' to {most}'}"
    if not job.memory_limit > 0:
        yield f"job.memory_limit is {job.memory_limit:g}"
    if plan.shares:
        yield from _faults_of_shares(plan)
    elif job.global_batch % max(1, plan.num_microbatches):
        yield f"a batch of {job.global_batch} cannot be {plan.num_microbatches} equal microbatches"
    if plan.objective < -_ROUNDING:
        yield f"objective is {plan.objective:g}"
    for number, variant in enumerate(plan.all_variants):
        yield from _faults_of_variant(variant, f"variants[{number - 1}]." if number else "")
    yield from _faults_of_stages(plan)
    if plan.fusion is not None:
        yield from plan.fusion.faults(len(plan.stages))
    if plan.simulated is not None:
        groups = len({stage.devices for stage in plan.stages}) * max(1, len(plan.shares))
        yield from _faults_of_times(plan.simulated, groups)


def _faults_of_shares(plan: "Plan") -> Iterator[str]:
    fault = next(share_faults(plan.shares, plan.num_microbatches), None)
    if fault is not None:
        yield fault
        return
    if plan.job.mode != "train":
        yield f"it has shares, and its mode is {plan.job.mode!r}"
    total, rows = row_microbatches(plan.shares), num_rows(plan.shares)
    for variant in plan.all_variants:
        if not variant.mesh or variant.mesh[0].size != rows:
            yield f"shares are of {rows} rows, the major axis of mesh {variant.device_mesh} has another size"
    if plan.job.global_batch % total:
        yield f"a batch of {plan.job.global_batch} cannot be {total} equal microbatches, those of all {rows} rows"


def _faults_of_variant(variant: "Variant", where: str) -> Iterator[str]:
    sizes = [axis.size for axis in variant.mesh]
    names = [axis.name for axis in variant.mesh]
    if any(not 1 <= size <= MAX_DEVICES for size in sizes):
        yield f"{where}mesh has an axis of {max(sizes) if min(sizes) > 0 else min(sizes)} devices"
        return
    if len(set(names)) < len(names) or not all(names):
        yield f"{where}mesh has axes named {', '.join(map(repr, names))}"
        return
    mesh = Mesh.of(**{axis.name: axis.size for axis in variant.mesh})
    if mesh.axes != variant.mesh:
        yield f"the strides of {where}mesh {mesh} are not those of its sizes"
    for block in variant.blocks:
        yield from _faults_of_placements(block, len(sizes), where)


def _faults_of_placements(block: "BlockPlan", axes: int, where: str) -> Iterator[str]:
    texts = [text for op in block.ops for text in (*op.inputs, *op.outputs) if text]
    items = (*block.states, *block.borrowed, *block.arrivals, *block.departures, *block.copies)
    texts += [item.placement for item in items]
    for text in dict.fromkeys(texts):
        try:
            placements = parse_placements(text)
        except ShardingError as error:
            yield f"{where}blocks of kind {block.kind}: {error.args[0]}"
            return
        if len(placements) != axes:
            yield f"{where}blocks of kind {block.kind}: {text!r} are {len(placements)} placements on {axes} mesh axes"
    for op in block.ops:
        divisors = [number.divisor for number in op.divided]
        entries = [*(number.entry for number in op.divided), *(number.entry for number in op.replaced)]
        if min(divisors, default=1) < 1 or min(entries, default=0) < 0:
            yield f"{where}blocks of kind {block.kind}: op {op.op!r} divides by {min(divisors, default=1)}"


def _faults_of_stages(plan: "Plan") -> Iterator[str]:
    if not plan.stages:
        yield "it has no stages"
        return
    instances = {index for variant in plan.all_variants for block in variant.blocks for index in block.instances}
    last = plan.stages[-1].blocks[1]
    for number, stage in enumerate(plan.stages):
        if not 0 <= stage.devices[0] < stage.devices[1] <= MAX_DEVICES:
            yield f"stage {number} has devices {_range(stage.devices)}"
        if not 0 <= stage.blocks[0] < stage.blocks[1] <= len(instances):
            yield f"stage {number} has blocks {_range(stage.blocks)}, the plan places {len(instances)}"
            return
        try:
            _ = stage.flavours
        except PlanError as error:
            yield f"stage {number}: {error.args[0]}"
    if plan.stages[0].blocks[0] != 0 or any(one.blocks[1] != next_.blocks[0] for one, next_ in pairwise(plan.stages)):
        yield "its stages do not have the blocks one after the other"
    if instances != set(range(last)):
        yield f"its stages have {last} blocks, and {len(instances)} are placed"


def _range(ends: Sequence[int]) -> str:
    return f"from {ends[0]} to {ends[1]}"


def _faults_of_times(found: "Simulated", groups: int) -> Iterator[str]:
    times = ("step_seconds", "compute_seconds", "exposed_seconds", "gradient_seconds", "bubble_seconds", "mfu")
    for name in (*times, "host_bytes"):
        if getattr(found, name) < -_ROUNDING:
            yield f"simulated.{name} is {getattr(found, name):g}"
    if len(found.stages) != groups:
        yield f"simulated.stages has {len(found.stages)} entries for stages on {groups} ranges of devices"
    for memory in found.stages:
        if min(memory.peak, memory.host, *memory.breakdown.values()) < 0:
            yield "simulated.stages has less than no memory"
