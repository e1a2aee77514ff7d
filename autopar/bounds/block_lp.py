"""Linear program of one repeated block: what it needs (`Component`) as a function of its choice of placements.

Look here for the pricing problem of the cut LP (`cut_lp.py`). At prices of the components, its optimum is the least
that such a block needs, whatever its placements and its recompute: a cut, valid for every stage of every schedule that
splits the backward alike, on one mesh and microbatch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.bounds.cut_lp import Component
from autopar.bounds.master_rows import SHARE_VARIABLES, IntArray, RowWriter, SlotCounts, StepProgram, Variable
from autopar.bounds.pass_rows import PassRows
from autopar.bounds.reshard_buffers import BufferUse, buffers
from autopar.formulate.block_memory import KEPT, RESIDENT, FloatArray
from autopar.formulate.offload_costs import HostRates
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Memory, Slot, Tables
from autopar.ir.graph import Phase
from autopar.recompute import Recompute


@dataclass(frozen=True, slots=True, eq=False)
class BlockProgram:
    """The rows of a block.

    Attributes:
        rows: The program, with a cost of zero.
        components: (components,) numbers of their variables.
    """

    rows: StepProgram
    components: IntArray

    def with_prices(self, prices: FloatArray) -> StepProgram:
        """Return the program with a cost of `prices`, (components,), per component."""
        cost = np.zeros(self.rows.lhs.shape[1])
        cost[self.components] = prices
        return replace(self.rows, cost=cost)

    def points(self, columns: FloatArray) -> FloatArray:
        """Evaluate what blocks of single choices need, (choices, components).

        Every row has one variable with a positive factor, and only variables of earlier rows with a negative one, so
        that values follow row by row.

        Args:
            columns: (choices, rows) what each choice adds to the rows.
        """
        values = np.zeros((len(columns), self.rows.lhs.shape[1]))
        for row, factors in enumerate(self.rows.lhs):
            (variable,) = np.flatnonzero(factors > 0)
            from_others = -np.where(factors < 0, factors, 0.0) @ values.T
            values[:, variable] = np.maximum(values[:, variable], self.rows.least[row] + columns[:, row] + from_others)
        return np.asarray(values[:, self.components])


def block_program(
    tables: Tables, pipeline: Pipeline, limit: float, flavours: Sequence[Recompute], fastest: Sequence[Recompute]
) -> BlockProgram:
    """Write the program of a block.

    Args:
        tables: The placement problem's tables.
        pipeline: The schedule, which says whether backwards are split and what overlaps.
        limit: Bytes per device; bytes of the block are shares of what buffers leave.
        flavours: Recompute flavours, from fastest to slowest.
        fastest: For each kind, the least that blocks of other kinds recompute.
    """
    rows, counting = RowWriter(tables, tuple(flavours)), SlotCounts(tables, tuple(flavours))
    passes = PassRows(tables, pipeline, rows, counting, fastest, HostRates(0.0, 0.0, 0.0)).write()
    main, count = counting.main, counting.counts[counting.main]
    forward: dict[Variable, float] = {_name(Component.FORWARD): 1.0}
    backward: dict[Variable, float] = {_name(Component.BACKWARD): 1.0}
    for name, total in passes.items():
        if name[1] == main:
            forwards = 1.0 if name[0] == "forward" else 0.0
            forward[name], backward[name] = -forwards, forwards - total / count
    plain: dict[Variable, float] = {name: -1.0 for name in passes if name[1] == main and name[0] != "recompute"}
    rows.add({_name(Component.PLAIN): 1.0, **plain})
    rows.add(forward)
    rows.add(backward, counting.of_kind(main, {Slot.GRADIENT: pipeline.overlap.share}))
    kept, resident = np.zeros((2, len(flavours), len(tables.bytes)))
    limit_bytes = limit - tables.folded.buffer_bytes
    for index, item in enumerate(tables.bytes):
        if item.kind == main:
            kept[:, index] = [(item.memory in KEPT[flavour]) / limit_bytes for flavour in flavours]
            resident[:, index] = (item.memory in RESIDENT) / limit_bytes
    rows.add({_name(Component.KEPT): 1.0}, amounts=kept)
    rows.add({_name(Component.RESIDENT): 1.0}, amounts=resident)
    rows.add({_name(Component.UPDATE): 1.0}, counting.of_kind(main, {Slot.UPDATE: 1.0}))
    blocks = counting.counts * (np.arange(len(counting.counts)) == main)
    reductions = counting.microbatch_reductions(blocks)[-1] / count
    step_reductions = counting.step_reductions(blocks)[-1] / count
    waits = (counting.forward_waits(blocks)[-1] + counting.backward_waits(blocks)[-1]) / count
    rows.add({_name(Component.LINK): 1.0}, waits + reductions)
    rows.add({_name(Component.GRADIENT): 1.0}, reductions)
    rows.add({_name(Component.LINK_ONCE): 1.0}, step_reductions)
    rows.buffers = tuple(buffer for buffer in buffers(tables) if buffer.kind == main)
    for use in (BufferUse.FORWARD, BufferUse.BACKWARD):
        gathered = [float(buffer.use in (use, BufferUse.REDUCING)) / limit_bytes for buffer in rows.buffers]
        rows.add({_name(Component.BUFFERS): 1.0}, amounts=np.zeros_like(kept), pairs=np.array(gathered))
        next_gathered = [float(buffer.use is use) / limit_bytes for buffer in rows.buffers]
        rows.add({_name(Component.NEXT_BUFFERS): 1.0}, amounts=np.zeros_like(kept), pairs=np.array(next_gathered))
    running = np.zeros_like(kept)
    running[:, _largest_transients(tables, main)] = 1 / limit_bytes
    rows.add({_name(Component.RUNNING): 1.0}, amounts=running)
    received = [(item.kind == main and item.memory is Memory.RECEIVED) / limit_bytes for item in tables.bytes]
    rows.add({_name(Component.RECEIVED): 1.0}, amounts=np.broadcast_to(np.array(received), kept.shape))
    program = rows.program({}, 0.0)
    return BlockProgram(program, np.array([rows.names[_name(component)] for component in Component]))


def _largest_transients(tables: Tables, kind: int) -> list[int]:
    """Items of the largest op output that exists besides all kept values at one moment of a backward.

    Only ops up to the first one that reads a value saved by the forward are considered: until then, all saved values
    still exist.
    """
    ops = tables.folded.kinds[kind].ops
    saved = {name for op in ops if op.phase in (Phase.FORWARD, Phase.LOSS) for name in op.outputs if name}
    saved.update(arrival.value for arrival in tables.folded.kinds[kind].arrivals if arrival.saved)
    transients: dict[int, list[int]] = {}
    for index, item in enumerate(tables.bytes):
        if item.kind == kind and item.memory is Memory.TRANSIENT:
            transients.setdefault(item.start, []).append(index)
    best: tuple[float, list[int]] = 0.0, []
    for position, op in enumerate(ops):
        if op.phase is not Phase.BACKWARD:
            continue
        items = transients.get(position, [])
        largest = sum(float(tables.bytes[index].amounts.max()) for index in items)
        best = max(best, (largest, items))
        if saved.intersection(op.inputs):
            break
    return best[1]


def _name(component: Component) -> str:
    """Name of the variable of a component."""
    return SHARE_VARIABLES.get(component, f"block {component.name}")
