"""A plan made by hand, for tests of what is done with plans."""

from dataclasses import replace

from autopar.cluster import PRESETS
from autopar.plan import (
    BlockPlan,
    Job,
    ModelInfo,
    OpPlacement,
    PhaseTime,
    Plan,
    SearchReport,
    Simulated,
    StageMemory,
    StagePlan,
    ValuePlacement,
    Variant,
)
from autopar.sharding import Axis

GB = 1e9


def _memory(parameters: float, activations: float) -> StageMemory:
    breakdown = {
        "parameters": parameters,
        "gradients": 2 * parameters,
        "optimizer": 6 * parameters,
        "buffers": 0.0,
        "activations": activations,
        "transient": 1 * GB,
    }
    return StageMemory(peak=sum(breakdown.values()), breakdown=breakdown)


def _simulated(step: float, bubble: float, activations: float) -> Simulated:
    return Simulated(
        step_seconds=step,
        compute_seconds=0.8,
        exposed_seconds=0.1,
        gradient_seconds=step - 0.9 - bubble,
        bubble_seconds=bubble,
        mfu=0.42,
        stages=(_memory(2 * GB, activations), _memory(2.5 * GB, activations / 2)),
        parts=(
            ("compute", 0.7),
            ("recompute", 0.08),
            ("tp communication", 0.1),
            ("dp communication", step - 0.9 - bubble),
            ("bubble", bubble),
            ("optimizer", 0.02),
        ),
        error=0.043,
    )


def two_stage_plan() -> Plan:
    """Return a training plan of 2 stages × (dp=2 × tp=2) with one runner-up; 2 of its 4 blocks are equal."""
    plan = Plan(
        model=ModelInfo("tiny", "zoo:tiny", "00", 1_000_000_000, tokens=1024),
        job=Job("train", 8, 64, 72 * GB, PRESETS["h100"].to_dict()),
        summary="dp=2 × tp=2 × pp=2, 1F1B, 4 microbatches of 16, no recompute",
        mesh=(Axis("dp", 2, 2), Axis("tp", 2, 1)),
        stages=(StagePlan((0, 2), (0, 4), "none"), StagePlan((2, 4), (4, 8), "full")),
        schedule="1f1b",
        num_microbatches=4,
        blocks=(
            BlockPlan(
                0,
                0,
                (0,),
                (OpPlacement("embed", ("RS(1)", "S(0)R"), ("S(0)S(2)",)),),
                (ValuePlacement("wte", "RS(1)"),),
            ),
            BlockPlan(
                1,
                1,
                (1, 2),
                (
                    OpPlacement("h.0.up", ("S(0)R", "RS(1)"), ("S(0)S(2)",)),
                    OpPlacement("h.0.down", ("S(0)S(2)", "RS(0)", ""), ("S(0)P",)),
                ),
                (ValuePlacement("h.0.up.weight", "RS(1)"), ValuePlacement("h.0.down.weight", "RS(0)")),
            ),
            BlockPlan(2, 3, (3,), (OpPlacement("loss", ("S(0)R",), ("PR",)),), ()),
        ),
        objective=0.98,
        simulated=_simulated(1.0, 0.08, 20 * GB),
        search=SearchReport(
            solver="auto",
            termination="optimal",
            objective=0.98,
            bound=0.97,
            space=("pipeline degree 1, 2, 4, 8 with equal submeshes", "1F1B and GPipe, 1 to 64 microbatches"),
            configurations=40,
            solved=12,
            pruned=28,
            phases=(PhaseTime("import", 0.4, 0.2 * GB), PhaseTime("solve", 3.1, 0.5 * GB)),
        ),
    )
    runner_up = replace(
        plan.without_alternatives(),
        summary="dp=4 × pp=2, 1F1B, 8 microbatches of 8, no recompute",
        objective=0.97,
        simulated=_simulated(1.05, 0.03, 30 * GB),
    )
    return replace(plan, alternatives=(runner_up,))


def two_variant_plan() -> Plan:
    """Return the same with a mesh of its own for each stage: dp=2 × tp=2, and tp=2; 6 devices, no runner-up."""
    plan = two_stage_plan()
    first, second = plan.stages
    blocks = (
        BlockPlan(
            1,
            1,
            (1, 2),
            (
                OpPlacement("h.0.up", ("S(0)", "R"), ("S(0)",)),
                OpPlacement("h.0.down", ("S(0)", "R", ""), ("S(0)",)),
            ),
            (ValuePlacement("h.0.up.weight", "S(0)"), ValuePlacement("h.0.down.weight", "R")),
        ),
        BlockPlan(2, 3, (3,), (OpPlacement("loss", ("S(0)",), ("P",)),), ()),
    )
    return replace(
        plan,
        summary="pp=2 of stage 0: dp=2 × tp=2; stage 1: dp=2, 1F1B, 4 microbatches of 16, no recompute",
        stages=(first, replace(second, devices=(4, 6), variant=1)),
        variants=(Variant((Axis("tp", 2, 1),), blocks),),
        alternatives=(),
        job=replace(plan.job, gpus=6),
    )
