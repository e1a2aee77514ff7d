"""Plans by degrees: every mesh axis has a task, what that leaves open is completed exactly, stages are cut evenly.

The placements go through the same tables, the same solver and the same assembly as those of a search; only that each
decision has few strategies left. They depend on the sizes of a microbatch and on the mesh and on nothing else, so that
plans which differ in stages, schedule, recompute or batch share them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.cost import CostModel
from autopar.degrees import Degrees
from autopar.discover import Rules
from autopar.errors import JobError
from autopar.formulate.fold import Folded
from autopar.formulate.recipes import BatchDims, Context, Data, Expert, Following, Megatron, Task
from autopar.formulate.step import Pipeline, problem, weights
from autopar.formulate.tables import Tables, build_tables
from autopar.plan import Job, ModelInfo, Plan, StagePlan
from autopar.problem import Choice
from autopar.recompute import Recompute, format_recompute
from autopar.schedule import SCHEDULES
from autopar.search.blocks import assemble_blocks
from autopar.search.summary import summarise
from autopar.sharding import Mesh
from autopar.solvers import Solver

_SECONDS = 20.0
"""Time limit of one placement problem; with few strategies left it takes milliseconds."""
_PRICED = Pipeline(num_stages=1, num_microbatches=8, schedule="1f1b")
"""What the open choices are priced for: they are few, and the same for any number of stages and microbatches."""


def axes(degrees: Degrees) -> tuple[Mesh, tuple[Task, ...]]:
    """Return the mesh of a stage, data axes outside and the tensor axis inside a node, and what each axis does."""
    zero = degrees.zero
    tasks: dict[str, tuple[int, Task]] = {
        "dp": (degrees.dp // degrees.ep, Data(zero)),
        "cp": (degrees.cp, Context(zero)),
        "ep": (degrees.ep, Expert(zero)),
        "tp": (degrees.tp, Megatron(degrees.sequence_parallel)),
    }
    kept = {name: pair for name, pair in tasks.items() if pair[0] > 1} or {"dp": tasks["dp"]}
    return Mesh.of(**{name: size for name, (size, _) in kept.items()}), tuple(task for _, task in kept.values())


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Placements by degrees.

    Attributes:
        tables: The decisions.
        choice: Strategy of each.
    """

    tables: Tables
    choice: Choice


def place(folded: Folded, rules: Rules, dims: BatchDims, degrees: Degrees, costs: CostModel, solver: Solver) -> Placed:
    """Return the placements that follow the degrees, what these leave open completed exactly.

    Raises:
        JobError: If nothing follows them.
    """
    mesh, tasks = axes(degrees)
    tables = build_tables(folded, rules, mesh, costs, Following(folded, rules, dims, tasks))
    weighting = weights(tables, _PRICED, recompute=Recompute.NONE, hidden=1.0, bounding=False, traffic=None)
    solution = solver.solve(problem(tables, weighting, name=str(degrees)), time_limit=_SECONDS)
    if solution.choice is None:
        raise JobError(
            f"the model cannot be placed on mesh {mesh} by these degrees ({solution.termination})",
            hint="try a smaller tensor-parallel degree, or let `autopar solve` choose",
        )
    return Placed(tables, solution.choice)


def cut(folded: Folded, degrees: Degrees) -> tuple[tuple[int, int], ...]:
    """Return the range of blocks of every stage.

    Repeated blocks are the layers. What comes before the first layer joins the first stage, what comes after the last
    joins the last. If layers do not divide evenly, what surrounds them counts as one layer at each end (a pipeline of
    12 stages has 6 of 70 layers each, and 5 at both ends).

    Raises:
        JobError: If there are fewer layers than stages, or other layers than given.
    """
    chain, kinds = folded.chain, folded.kinds
    layers = [index for index, kind in enumerate(chain) if kinds[kind].count > 1] or list(range(len(chain)))
    number, stages = len(layers), degrees.num_stages
    if len(chain) < stages:
        raise JobError(
            f"{number} layers cannot be cut into {stages} stages (pp {degrees.pp} x interleave {degrees.interleave})",
            hint=f"use at most {number} stages",
        )
    if degrees.layers:
        counts: Sequence[int] = degrees.layers
        if sum(counts) != number or min(counts) < 0:
            raise JobError(
                f"layers per stage add up to {sum(counts)}, the model has {number}",
                hint="give one number per stage, in the order of the chain",
            )
    else:
        counts = _even(number, stages)
    ranges, start = [], 0
    for index, end in enumerate(accumulate(counts)):
        stop = len(chain) if index == stages - 1 else (layers[end - 1] + 1 if end else layers[0])
        if stop == start:
            raise JobError(
                f"stage {index} of {stages} would have no block: {number} layers, {len(chain) - number} other blocks",
                hint=f"use at most {number} stages",
            )
        ranges.append((start, stop))
        start = stop
    return tuple(ranges)


def _even(number: int, stages: int) -> list[int]:
    if number % stages == 0 or stages == 1:
        return [number // stages] * stages
    whole, more = divmod(number + 2, stages)  # the ends count as layers
    counts = [whole] * stages
    for index in range(more):  # the longer stages lie in the middle, away from the ends
        counts[(stages - more) // 2 + index] += 1
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _recompute(folded: Folded, start: int, stop: int, degrees: Degrees) -> str:
    """Return what the blocks of a stage recompute: layers what is asked for, what surrounds them nothing."""
    layers = (folded.kinds[kind].count > 1 for kind in folded.chain[start:stop])
    return format_recompute(tuple(Recompute(degrees.recompute) if layer else Recompute.NONE for layer in layers))


def plan_by_degrees(placed: Placed, degrees: Degrees, model: ModelInfo, job: Job) -> Plan:
    """Return the plan of stated degrees, neither verified nor simulated.

    Args:
        placed: Placements that follow them.
        degrees: The degrees.
        model: The model.
        job: The request.

    Raises:
        JobError: If the layers cannot be cut into the stages.
    """
    mesh, folded = placed.tables.mesh, placed.tables.folded
    schedule = "interleaved" if degrees.interleave > 1 and degrees.schedule == "1f1b" else degrees.schedule
    why, hint = SCHEDULES[schedule].problem(degrees.pp, degrees.num_microbatches, degrees.interleave)
    if why:
        raise JobError(f"schedule {schedule} {why}", hint=hint)
    groups = SCHEDULES[schedule].groups(degrees.pp, degrees.interleave)
    stages = tuple(
        StagePlan((start, stop), (group * mesh.size, (group + 1) * mesh.size), _recompute(folded, start, stop, degrees))
        for (start, stop), group in zip(cut(folded, degrees), groups, strict=True)
    )
    plan = Plan(
        model=model,
        job=job,
        summary="",
        mesh=mesh.axes,
        stages=stages,
        schedule=schedule,
        num_microbatches=degrees.num_microbatches,
        blocks=assemble_blocks(placed.tables, placed.choice),
        objective=0.0,
    )
    return summarise(plan, folded)
