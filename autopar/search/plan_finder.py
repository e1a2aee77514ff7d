"""From placements of one node to a plan: the chain of blocks is cut into stages, and the best plan is kept."""

from autopar.configuration import Configuration
from autopar.formulate.block_memory import ChainBytes
from autopar.formulate.scheduled_step import pass_seconds
from autopar.formulate.tables import FloatArray
from autopar.problem import Choice
from autopar.schedule import SCHEDULES
from autopar.search.lowered_memory import ChoiceCosts
from autopar.search.node_state import NodeState
from autopar.search.stage_cutting import StageCutter


class PlanFinder:
    """Turns placements into plans and updates the incumbent of the node.

    Args:
        state: The node.

    Attributes:
        weighing: Bytes and transfers of placements, as the simulator counts them.
    """

    def __init__(self, state: NodeState) -> None:
        search = state.search
        self._state = state
        self._considered: dict[Choice, None] = {}
        self.costs = ChoiceCosts(
            state.tables,
            state.pipeline,
            state.configuration.mesh.size,
            state.flavours,
            search.host_room,
            bool(search.constraints.hosted),
            search.constraints.what,
        )
        pipelines = zip(state.family, state.pipelines, strict=True)
        self._cutter = StageCutter(search, tuple(pipelines), state.tables, self.costs)

    @property
    def considered(self) -> tuple[Choice, ...]:
        """Placements that were cut into stages, in this order."""
        return tuple(self._considered)

    def consider(self, choice: Choice) -> None:
        """Cut the chain of blocks for placements that are new, and keep the plan if it improves the incumbent."""
        if choice in self._considered:
            return
        self._considered[choice] = None
        state, bounds = self._state, list[float]()

        def least(configuration: Configuration) -> float:
            if state.column_generation is None or configuration not in state.bounded:
                return 0.0
            if not bounds:
                bounds.append(state.column_generation.bound_of_choice(choice))
            return bounds[0]

        state.best = self._cutter.best_plan(choice, state.best, state.cutoff, least, state.is_stopped)

    def block_costs(self, choice: Choice) -> tuple[ChainBytes, FloatArray]:
        """Return the bytes of every range of blocks, and the seconds of blocks with host copies, (kinds, slots)."""
        tables, splits = self._state.tables, SCHEDULES[self._state.pipeline.schedule].splits
        totals, passes = tables.block_seconds(choice), pass_seconds(tables, choice, splits=splits)
        return self.costs.bytes(choice, splits=splits), self.costs.seconds_with_copies(
            choice, totals, passes, splits=splits
        )
