"""Grid search: each recipe restricts the choices, coordinate descent completes them, the cheapest wins."""

import math

from autopar.problem import Problem, Recipe
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.local_search.coordinate_descent import search
from autopar.solvers.model.graphical_model import prepare


class Grid(Solver):
    """A baseline: what known recipes find. Without recipes, those that give all nodes the same strategy number."""

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        whole = prepare(problem)
        budget.raise_bound(math.inf if whole is None else whole.field.lowest_cost(), EXACT)
        for recipe in problem.recipes or uniform_recipes(problem):
            if budget.spent():
                break
            search(problem, budget, allowed=recipe.allowed)


def uniform_recipes(problem: Problem) -> tuple[Recipe, ...]:
    """Return per strategy number the recipe that gives it to every node that has it and leaves the others free."""
    sizes = problem.num_strategies
    return tuple(
        Recipe(f"strategy {k}", tuple((k,) if k < size else tuple(range(size)) for size in sizes))
        for k in range(max(sizes, default=0))
    )
