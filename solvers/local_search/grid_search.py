"""Grid search: coordinate descent within each recipe (a restriction of the strategies); the cheapest choice wins."""

import math

from autopar.problem import Problem, Recipe
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.local_search.coordinate_descent import search
from autopar.solvers.model.graphical_model import prepare


class Grid(Solver):
    """Baseline: the best choice of known recipes; without recipes, those that give all nodes one strategy number."""

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        whole = prepare(problem)
        budget.raise_bound(math.inf if whole is None else whole.field.lowest_cost(), EXACT)
        for recipe in problem.recipes or uniform_recipes(problem):
            if budget.spent():
                break
            search(problem, budget, allowed=recipe.allowed)


def uniform_recipes(problem: Problem) -> tuple[Recipe, ...]:
    """Return per strategy number a recipe: nodes that have this strategy take it, the others stay free."""
    sizes = problem.num_strategies
    return tuple(
        Recipe(f"strategy {k}", tuple((k,) if k < size else tuple(range(size)) for size in sizes))
        for k in range(max(sizes, default=0))
    )
