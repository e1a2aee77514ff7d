"""Plans whose stages have meshes and placements of their own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.configuration import Configuration
from autopar.describe.block_decisions import assemble_blocks
from autopar.discover import Rules
from autopar.folding.fold import Folded
from autopar.formulate.building import build_tables
from autopar.formulate.step_time import Split, StepTime
from autopar.formulate.tables import Tables
from autopar.plan import Plan, StagePlan, Variant
from autopar.problem import Choice
from autopar.recompute import ON_DEVICE, Recompute
from autopar.schedule import SCHEDULES
from autopar.search.candidate import Candidate
from autopar.sharding import Mesh
from tests.executions import COSTS, any_offload, any_recompute, random_choice, written

Placed = tuple[Tables, Choice]
"""Placements of a whole model on a mesh."""


def random_variants(folded: Folded, rules: Rules, meshes: Sequence[Mesh], seed: int) -> list[Placed]:
    """Return random placements for each of the meshes; equal meshes get other placements each."""
    rng = np.random.default_rng(seed)
    known: dict[Mesh, Tables] = {}
    placed = []
    for mesh in meshes:
        if mesh not in known:
            known[mesh] = build_tables(folded, rules, mesh, COSTS)
        placed.append((known[mesh], random_choice(known[mesh], rng)))
    return placed


def plan_of_variants(
    variants: Sequence[Placed],
    stages: Sequence[int],
    schedule: str,
    num_microbatches: int,
    samples: int,
    seed: int = 0,
    *,
    ranges: Sequence[tuple[int, int]] = (),
) -> Plan:
    """Return a plan with random stage boundaries and recompute.

    Args:
        variants: Placements on meshes; every one is used.
        stages: Number of its variant for each group of devices.
        schedule: A key of `SCHEDULES`; with "interleaved" and "zb-v" each group has two stages.
        num_microbatches: Microbatches per step.
        samples: Samples of a microbatch.
        seed: For what is drawn.
        ranges: Blocks of each stage; random by default.
    """
    rng = np.random.default_rng(seed)
    trains = SCHEDULES[schedule].trains
    folded = variants[0][0].folded
    turns = SCHEDULES[schedule].groups(len(stages), 2 if schedule in ("interleaved", "zb-v", "dualpipe-v") else 1)
    blocks = folded.num_blocks
    cuts = [0, *sorted(rng.choice(np.arange(1, blocks), len(turns) - 1, replace=False).tolist()), blocks]
    drawn = [(cuts[i], cuts[i + 1]) for i in range(len(turns))]
    sizes = [variants[number][0].mesh.size for number in stages]
    devices = [(sum(sizes[:group]), sum(sizes[: group + 1])) for group in range(len(stages))]
    flavours = list(ON_DEVICE) if trains else [Recompute.NONE]
    placed = tuple(
        StagePlan(
            tuple(ranges or drawn)[index],
            devices[group],
            str(flavours[int(rng.integers(0, len(flavours)))]),
            stages[group],
        )
        for index, group in enumerate(turns)
    )
    tables, choice = variants[0]
    whole = Candidate(
        Configuration(1, tables.mesh, num_microbatches, schedule),
        tables,
        choice,
        Split.uniform(((0, blocks),), (Recompute.NONE,)),
        StepTime(1.0, 1.0, 0.0, np.ones(1)),
    )
    plan = written(whole, samples * num_microbatches, trains)
    others = tuple(Variant(other.mesh.axes, assemble_blocks(other, found)) for other, found in variants[1:])
    plan = replace(plan, stages=placed, variants=others, job=replace(plan.job, gpus=sum(sizes)))
    plan = any_recompute(plan, folded, rng)
    plan = any_offload(plan, np.random.default_rng([seed, 1])) if trains else plan
    return Plan.from_json(plan.to_json())


def random_plan_of_variants(
    folded: Folded,
    rules: Rules,
    meshes: Sequence[Mesh],
    schedule: str,
    num_microbatches: int,
    samples: int,
    seed: int,
) -> Plan:
    """Return a random plan with a variant for each group of devices, on the given meshes."""
    variants = random_variants(folded, rules, meshes, seed)
    return plan_of_variants(variants, range(len(meshes)), schedule, num_microbatches, samples, seed)


def staged(plans: Sequence[Plan], schedule: str, layers: Sequence[int]) -> Plan:
    """Return a plan in which each group of devices is placed as a plan of one stage; their microbatches are equal.

    Args:
        plans: Per group of devices.
        schedule: A key of `SCHEDULES`; with "interleaved" and "zb-v" each group has two stages.
        layers: Blocks of each stage but the last, which has the rest.
    """
    turns = SCHEDULES[schedule].groups(len(plans), 2 if schedule in ("interleaved", "zb-v", "dualpipe-v") else 1)
    cuts = [0, *np.cumsum(layers).tolist(), plans[0].stages[-1].blocks[1]]
    ends = np.cumsum([0, *(plan.device_mesh.size for plan in plans)]).tolist()
    stages = tuple(
        StagePlan(
            (cuts[index], cuts[index + 1]), (ends[group], ends[group + 1]), plans[group].stages[0].recompute, group
        )
        for index, group in enumerate(turns)
    )
    variants = tuple(Variant(plan.mesh, plan.blocks) for plan in plans[1:])
    return replace(
        plans[0],
        stages=stages,
        schedule=schedule,
        variants=variants,
        job=replace(plans[0].job, gpus=ends[-1]),
        simulated=None,
    )
