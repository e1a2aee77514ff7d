"""Submesh bound: least seconds of a microbatch on three mesh axes, from placement problems on two of them.

Look here for the bound that covers all `dp × outer × inner` meshes with equal free axes at once. `submesh_tables.py`
argues which terms are valid for every data-parallel axis.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.bounds.microbatch import MicrobatchBound, host_launch_bound
from autopar.bounds.saved_values import main_kind
from autopar.bounds.submesh_tables import tables_of_passes
from autopar.cost import Overlap
from autopar.formulate.data_major import DataMajor
from autopar.formulate.linear_weights import kind_weights, problem, weights
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Tables
from autopar.problem import Problem
from autopar.recompute import Recompute
from autopar.solvers.limited import Limited

_SCHEDULES = ("1f1b", "zb-h1")
"""One schedule with joint and one with split backwards, behind which collectives hide less."""


@dataclass(frozen=True, slots=True)
class SubmeshBounds:
    """Lower bounds on a microbatch, and the work spent on them.

    Attributes:
        joint: With joint backwards.
        split: With split backwards.
        work: Units of work of placement problems.
        cut: Number of placement problems cut off by a limit.
    """

    joint: MicrobatchBound
    split: MicrobatchBound
    work: float
    cut: int


def submesh_bounds(
    tables: Tables, data: DataMajor, overlap: Overlap, solve: Callable[[Problem], Limited]
) -> SubmeshBounds:
    """Lower bounds on the seconds of a microbatch on every mesh dp × outer × inner.

    - *Relaxes*: the dp axis, which costs nothing; memory; parameter gathers, gradient sums and updates.
    - *Valid when*: microbatches have dp times the samples of `tables`, and the two graphs have the same ops on
      proportional dims (`roofline.scales`).
    - *Cost*: three placement problems: joint backward, split backward, one block.
    - *Source*: projection of placements onto the free axes, argued in `submesh_tables.py`.

    Args:
        tables: Decisions and prices on outer × inner, unrestricted.
        data: What a data-parallel axis does with the graph of the tables.
        overlap: How much communication hides behind compute.
        solve: Solves a placement problem within its limit of work.
    """
    mesh, folded = tables.mesh, tables.folded
    restricted = tables_of_passes(tables, data)
    microbatch_bounds, work, num_cut = [], 0.0, 0
    for schedule in _SCHEDULES:
        pipeline = Pipeline(2, 1, schedule, overlap)  # several stages: no tail of a single stage
        weighting = weights(restricted, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True)
        instance = problem(restricted, weighting, name=f"{mesh} alone")
        limited = solve(instance)
        bound = max(0.0, limited.solution.bound, host_launch_bound(restricted, pipeline))
        microbatch_bounds.append(MicrobatchBound(bound * pipeline.num_groups / pipeline.rounds, ()))
        work, num_cut = work + limited.work, num_cut + limited.cut
    # A bound on one whole block is tighter for stages than the mean over all blocks.
    main = main_kind(folded).id
    instance = problem(restricted, kind_weights(restricted, [main], 0.0), name=f"{mesh} alone, a block")
    limited = solve(instance)
    block = max(0.0, limited.solution.bound)
    blocks = tuple(block if kind == main else 0.0 for kind in folded.chain)
    return SubmeshBounds(
        replace(microbatch_bounds[0], blocks=blocks), microbatch_bounds[1], work + limited.work, num_cut + limited.cut
    )
