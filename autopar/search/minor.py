"""What a microbatch takes at least on meshes of three axes, from one small placement problem on the two free ones.

`autopar.formulate.minor` says which terms hold for every data-parallel axis besides.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.cost import Overlap
from autopar.formulate.building import build_tables
from autopar.formulate.data_major import DataMajor
from autopar.formulate.keeping import main_kind
from autopar.formulate.minor import passes_alone
from autopar.formulate.step import Pipeline
from autopar.formulate.weights import kind_weights, problem, weights
from autopar.recompute import Recompute
from autopar.search.limits import solve_limited
from autopar.search.pace import Pace, launched
from autopar.sharding import Mesh

if TYPE_CHECKING:  # it knows this module
    from autopar.search.planner import Search

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


def minor_paces(search: "Search", mesh: Mesh, samples: int, end: float) -> MinorPaces:
    """Return what a microbatch takes at least on every dp × `mesh` with dp times so many samples.

    Args:
        search: What it is part of.
        mesh: The two free axes.
        samples: Samples of a microbatch on them.
        end: When to end, on the monotonic clock.
    """
    batch = search.constraints.batch
    assert batch is not None, "meshes of three axes ask for it"
    folded = search.folded(samples)
    tables = build_tables(folded, search.rules(folded), mesh, search.costs)
    alone = passes_alone(tables, DataMajor.of(folded, batch(folded), None))
    paces, work, cut = [], 0.0, 0
    for schedule in _SCHEDULES:
        pipeline = Pipeline(2, 1, schedule, Overlap.of(search.costs.stack))  # without what one stage does at the end
        weighting = weights(alone, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True)
        instance = problem(alone, weighting, name=f"{mesh} alone")
        found = solve_limited(search.solver, instance, end, should_stop=search.should_stop, seed=search.seed)
        bound = max(0.0, found.solution.bound, launched(alone, pipeline))
        paces.append(Pace(bound * pipeline.num_groups / pipeline.rounds, ()))
        work, cut = work + found.work, cut + found.cut
    # Blocks are whole: what one takes alone says more of stages than the mean does.
    main = main_kind(folded).id
    instance = problem(alone, kind_weights(alone, [main], 0.0), name=f"{mesh} alone, a block")
    found = solve_limited(search.solver, instance, end, should_stop=search.should_stop, seed=search.seed)
    block = max(0.0, found.solution.bound)
    blocks = tuple(block if kind == main else 0.0 for kind in folded.chain)
    return MinorPaces(replace(paces[0], blocks=blocks), paces[1], work + found.work, cut + found.cut)
