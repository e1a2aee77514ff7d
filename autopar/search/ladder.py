"""The rungs of the ladder of lower bounds that take a task of a worker, from cheap to dear.

Below them are the bounds that this process raises by itself: roofline (`bounds/roofline.py`), then transfer from other
nodes, memory, cuts and critical path (`bounds/transfer.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autopar.bounds.submesh_tables import inner_mesh
from autopar.bounds.transfer import TransferBounds
from autopar.configuration import Configuration
from autopar.formulate.data_major import is_data_major
from autopar.search.context import SearchContext
from autopar.search.node import Node
from autopar.search.outcome import Outcome
from autopar.search.tasks import SearchTask, TaskKind
from autopar.sharding import Mesh


@dataclass(slots=True, eq=False)
class Knowledge:
    """What the rungs know of the search.

    Attributes:
        context: Inputs of the search.
        outcome: Incumbent and counters.
        transfer_bounds: Bounds from other nodes.
        submeshes: Submeshes, samples on each, and whether the all-to-all of experts is hidden, of microbatches that are
            bounded or being bounded.
    """

    context: SearchContext
    outcome: Outcome
    transfer_bounds: TransferBounds
    submeshes: set[tuple[Mesh, int, bool]] = field(default_factory=set)

    def samples(self, node: Node) -> int:
        """Return the samples of a microbatch of a node."""
        return self.context.global_batch // node.family[0].num_microbatches


class LowerBound(Protocol):
    """A rung of the ladder.

    Attributes:
        name: In a few words.
    """

    name: str

    def raise_(self, node: Node, known: Knowledge, cutoff: float) -> SearchTask | None:
        """Return the task that raises the bound of a node to the cutoff, if it can; None if the rung was climbed.

        Args:
            node: The node.
            known: What is known.
            cutoff: Bound in seconds that excludes the node.
        """


class Submesh:
    """Bounds a microbatch on dp x outer x inner by its share of the samples on outer x inner alone.

    *Relaxes* gradient sums, updates and all work on parameters; *valid when* the major axis of the mesh is data
    parallel and divides the samples; *cost*: one table and three small placement problems, which serve every dp, number
    of stages and schedule that hides the all-to-all of experts alike; *source*: `bounds/submesh.py`.
    """

    name = "submesh"

    def raise_(self, node: Node, known: Knowledge, cutoff: float) -> SearchTask | None:
        """See `LowerBound.raise_`."""
        mesh, samples = node.family[0].mesh, known.samples(node)
        few, many = known.context.roofline.samples  # equal if the model insists on its samples
        if node.relaxed or not is_data_major(mesh) or few == many or samples % mesh.shape[0]:
            return None
        key = inner_mesh(mesh), samples // mesh.shape[0], node.family[0].hides_dispatch
        if key in known.submeshes:
            return None
        known.submeshes.add(key)
        schedule = "1f1b-a2a" if key[2] else "1f1b"
        alone = Configuration(1, key[0], known.context.global_batch // key[1], schedule)
        return SearchTask(TaskKind.SUBMESH, (alone,), 0.0, cutoff)


class Relaxation:
    """Bounds a node by its placement problem without memory limits, then by a few columns of the master problem.

    *Relaxes* memory limits, the integrality of stage cuts, and exposed communication; *valid* for every node; *cost*: a
    placement problem, a tenth of a second to seconds; *source*: `search/node_solver.py`, `bounds/column_generation.py`.
    """

    name = "relaxation"

    def raise_(self, node: Node, known: Knowledge, cutoff: float) -> SearchTask | None:
        """See `LowerBound.raise_`."""
        if node.relaxed:
            return None
        best = known.outcome.best
        return SearchTask(
            TaskKind.BOUND,
            node.family,
            node.bound,
            cutoff,
            needs_plan=math.isinf(best),
            find_plan_below=best / known.context.settings.weak_bound_ratio,
            warm_start=known.transfer_bounds.warm_start(node.family),
        )


class Advance:
    """Bounds a node by column generation under the memory limit, at the end by a proof over single choices.

    *Relaxes* single choices to their means until the proof; *valid* once the relaxation is solved; *cost*: four prices
    a task, many tasks a node, and for the proof up to as much as all before; *source*: Dantzig and Wolfe (1960),
    `bounds/column_generation.py`, `bounds/cut_lp.py`, `bounds/integer.py`.
    """

    name = "column generation and proof"

    def raise_(self, node: Node, known: Knowledge, cutoff: float) -> SearchTask | None:
        """See `LowerBound.raise_`."""
        needs_plan = math.isinf(known.outcome.best)
        return SearchTask(TaskKind.ADVANCE, node.family, node.bound, known.outcome.best, needs_plan=needs_plan)


LADDER: Sequence[LowerBound] = (Submesh(), Relaxation(), Advance())
"""The rungs, from cheap to dear."""
