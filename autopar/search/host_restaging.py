"""Whether host memory makes the plans of a search faster: their placements cut into stages again with it opened.

A plan that fits on the devices alone may recompute less, or nothing, with a part of its states in host memory; where
devices are close to their hosts that is faster. Placements stay those of the plans, so that it takes the time of a few
cuts and no further placement problem.
"""

import math
import time
from collections.abc import Sequence

from autopar.recompute import Recompute
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.lowered_memory import ChoiceCosts
from autopar.search.stage_cutting import StageCutter

MOST_RESTAGED = 3
"""Plans that are cut again, best first."""

LEAST_GAIN = 0.01
"""A plan with host memory has to be faster by this part: it is harder to set up."""


def restaged(context: SearchContext, candidates: Sequence[Candidate], end: float) -> list[Candidate]:
    """Return plans with host memory that are faster than the best plan without, on placements of the best plans.

    Heuristic: tried after a search whose best plan recomputes (`may_gain`).

    Args:
        context: Inputs of a search with host memory opened.
        candidates: Plans without host memory, best first.
        end: When to stop, on the monotonic clock.
    """
    cutoff, found = candidates[0].objective * (1 - LEAST_GAIN), list[Candidate]()
    for candidate in [own for own in candidates if _recomputes(own)][:MOST_RESTAGED]:
        if time.monotonic() > end:
            break
        other = _restaged(context, candidate, cutoff)
        if other is not None and other.objective < cutoff:
            found.append(other)
    return found


def may_gain(candidates: Sequence[Candidate]) -> bool:
    """Whether the best plan of a search recomputes; others have nothing to gain on their placements."""
    return bool(candidates) and _recomputes(candidates[0])


def _recomputes(candidate: Candidate) -> bool:
    """Whether a plan has stages of one mesh, some blocks of which run again."""
    has_variants = candidate.draft is not None and bool(candidate.draft.variants)
    return not has_variants and any(flavour is not Recompute.NONE for flavour in candidate.split.flavours)


def _restaged(context: SearchContext, candidate: Candidate, cutoff: float) -> Candidate | None:
    """Return the best plan of the placements and the schedule of a candidate; None if none is below the cutoff."""
    configuration = candidate.configuration
    tables = context.tables((configuration,))
    if tables is None:
        return None
    pipeline = configuration.pipeline(context.costs.stack)
    constraints = context.constraints
    costs = ChoiceCosts(
        tables,
        pipeline,
        configuration.mesh.size,
        constraints.flavours(),
        context.host_room,
        offloads=True,
        what=constraints.what,
    )
    cutter = StageCutter(context, ((configuration, pipeline),), tables, costs)
    return cutter.best_plan(candidate.choice, None, cutoff, lambda _: -math.inf, context.should_stop)
