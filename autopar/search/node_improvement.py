"""Local search over placements from the incumbent of a node of one stage (`placement_descent.py`)."""

from autopar.formulate.step_time import step_time
from autopar.problem import Choice
from autopar.search.node_state import NodeState
from autopar.search.placement_descent import Neighbourhood, descend
from autopar.search.plan_finder import PlanFinder


class NodeImprovement:
    """Looks for better plans near the incumbent of a node, at the prices of its master problem.

    Args:
        state: The node.
        finder: Turns placements into plans.
    """

    def __init__(self, state: NodeState, finder: PlanFinder) -> None:
        self._state, self._finder = state, finder

    def improve(self) -> None:
        """Descend from the incumbent, if the node has one stage and a master problem."""
        state = self._state
        if state.best is None or state.hull is None or state.pipeline.num_stages > 1:
            return
        tables, pipeline, split = state.tables, state.pipeline, state.best.split

        def seconds(choice: Choice) -> float:
            return step_time(tables.block_seconds(choice), tables.folded.chain, pipeline, split, 0.0).seconds

        instance, constant = state.hull.priced()
        near = Neighbourhood(tables, instance, state.settings)
        path = list(descend(state.best.choice, near, constant, seconds, state.is_stopped, state.settings))
        known = state.best
        while path and state.best is known:  # the last one is the fastest; if it does not fit, an earlier one may
            self._finder.consider(path[-1])
            path = path[: len(path) // 2]
