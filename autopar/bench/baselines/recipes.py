"""Recipes by hand: every configuration of the outer space times every recipe in use, nothing pruned.

Same costs, same stages, same memory rules and same simulator as the planner. What a recipe leaves open is completed
exactly, which is kinder to them than any hand would be.
"""

import math
import time

from autopar.formulate.recipes import BatchDims, recipes
from autopar.formulate.step import Pipeline
from autopar.progress import Progress
from autopar.search.attempt import Attempt
from autopar.search.history import History
from autopar.search.outcome import Outcome
from autopar.search.planner import Search
from autopar.search.space import Configuration, undominated


def recipe_search(search: Search, space: list[Configuration], dims: BatchDims) -> Outcome:
    """Return the candidates of all recipes in all configurations, best first; the bound is trivial."""
    listed, space = len(space), undominated(space)
    outcome = Outcome(bound=0.0, pruned=listed - len(space), history=History(search.before))
    end = time.monotonic() + search.time_limit
    for done, configuration in enumerate(space):
        if search.should_stop() or time.monotonic() > end:
            outcome.stopped = "interrupted" if search.should_stop() else "time limit"
            break
        samples = search.global_batch // configuration.num_microbatches
        folded = search.folded(samples)
        tables = search.constraints.tables(folded, search.rules(folded), configuration.mesh, search.costs)
        if tables is None:
            continue
        pipeline = Pipeline(configuration.num_stages, configuration.num_microbatches, configuration.schedule)
        attempt = Attempt(search, configuration, tables, pipeline, end)
        attempt.follow(recipes(tables, dims))
        outcome.solved += 1
        if attempt.best is not None:
            outcome.candidates.append(attempt.best)
            outcome.candidates.sort(key=lambda candidate: candidate.objective)
        best = outcome.candidates[0].objective if outcome.candidates else math.inf
        outcome.history.note(best, 0.0)
        search.progress(Progress("recipes", done + 1, len(space), best, 0.0, str(configuration)))
    return outcome
