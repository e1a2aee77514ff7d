"""What a microbatch takes at least on meshes of three axes, from one small placement problem on the two free ones.

`autopar.bounds.submesh_tables` says which terms hold for every data-parallel axis besides.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.bounds.microbatch import Pace, launched
from autopar.bounds.saved_values import main_kind
from autopar.bounds.submesh_tables import passes_alone
from autopar.cost import Overlap
from autopar.formulate.data_major import DataMajor
from autopar.formulate.linear_weights import kind_weights, problem, weights
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Tables
from autopar.problem import Problem
from autopar.recompute import Recompute
from autopar.solvers.limited import Limited

_SCHEDULES = ("1f1b", "zb-h1")
"""One with joint and one with split backwards: in the latter collectives have less to hide behind."""


@dataclass(frozen=True, slots=True)
class MinorPaces:
    """What a microbatch takes at least, and what that took to find out.

    Attributes:
        joint: With joint backwards.
        split: With split ones.
        work: Units of work of placement problems.
        cut: How many of them a limit has cut.
    """

    joint: Pace
    split: Pace
    work: float
    cut: int


def minor_paces(tables: Tables, data: DataMajor, overlap: Overlap, solve: Callable[[Problem], Limited]) -> MinorPaces:
    """Return lower bounds on the seconds of a microbatch on every mesh dp × outer × inner.

    Relaxes the dp axis: it splits every batch at no cost. Valid for microbatches of dp times the samples of `tables`.

    Args:
        tables: Decisions and prices on outer × inner, unrestricted.
        data: What a data-parallel axis does with the graph of the tables.
        overlap: How much communication hides behind compute.
        solve: Solves a placement problem within its limit of work.
    """
    mesh, folded = tables.mesh, tables.folded
    alone = passes_alone(tables, data)
    paces, work, cut = [], 0.0, 0
    for schedule in _SCHEDULES:
        pipeline = Pipeline(2, 1, schedule, overlap)  # without what one stage does at the end
        weighting = weights(alone, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True)
        instance = problem(alone, weighting, name=f"{mesh} alone")
        found = solve(instance)
        bound = max(0.0, found.solution.bound, launched(alone, pipeline))
        paces.append(Pace(bound * pipeline.num_groups / pipeline.rounds, ()))
        work, cut = work + found.work, cut + found.cut
    # Blocks are whole: what one takes alone says more of stages than the mean does.
    main = main_kind(folded).id
    instance = problem(alone, kind_weights(alone, [main], 0.0), name=f"{mesh} alone, a block")
    found = solve(instance)
    block = max(0.0, found.solution.bound)
    blocks = tuple(block if kind == main else 0.0 for kind in folded.chain)
    return MinorPaces(replace(paces[0], blocks=blocks), paces[1], work + found.work, cut + found.cut)
