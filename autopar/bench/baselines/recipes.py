"""Recipes by hand: every configuration of the outer space times every recipe in use, nothing pruned.

Same costs, same stages, same memory rules and same simulator as the planner. What a recipe leaves open is completed
exactly, which is kinder to them than any hand would be.
"""

import math
import time

from autopar.configuration import Configuration, families
from autopar.formulate.manual_recipes import BatchDims, recipes
from autopar.progress import Progress
from autopar.search.context import SearchContext
from autopar.search.history import History
from autopar.search.node_solver import open_node
from autopar.search.outcome import Outcome


def recipe_search(search: SearchContext, space: list[Configuration], dims: BatchDims) -> Outcome:
    """Return the candidates of all recipes in all configurations, best first; the bound is trivial."""
    outcome = Outcome(bound=0.0, history=History(search.before))
    end = time.monotonic() + search.time_limit
    known = families(space)
    for done, family in enumerate(known):
        if search.should_stop() or time.monotonic() > end:
            outcome.stopped = "interrupted" if search.should_stop() else "time limit"
            break
        outcome.solved += len(family)
        node = open_node(search, family, end)
        if node is None:
            continue
        node.consider_recipes(recipes(node.tables, dims))
        if node.best is not None:
            outcome.candidates.append(node.best)
            outcome.candidates.sort(key=lambda candidate: candidate.objective)
        best = outcome.candidates[0].objective if outcome.candidates else math.inf
        outcome.history.record(best, 0.0)
        search.progress(Progress("recipes", done + 1, len(known), best, 0.0, family[0].words))
    return outcome
