"""What one block of the most frequent kind takes and holds (`Take`), as a linear program over its choices.

At prices of what is taken its optimum is what such a block costs at least, whatever its placements and its recompute:
a cut of `autopar.bounds.cut_lp`, which holds for every stage of every schedule of the same microbatches on a mesh.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.bounds.cut_lp import Take
from autopar.bounds.master_rows import SHARES, Counting, IntArray, Name, Rows, StepProgram
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
        rows: The program; nothing costs anything.
        takes: (takes,) the variables that are what a block takes.
    """

    rows: StepProgram
    takes: IntArray

    def priced(self, prices: FloatArray) -> StepProgram:
        """Return the program at prices of what is taken, (takes,)."""
        cost = np.zeros(self.rows.lhs.shape[1])
        cost[self.takes] = prices
        return replace(self.rows, cost=cost)

    def points(self, columns: FloatArray) -> FloatArray:
        """Return what blocks of single choices take, (choices, takes), given what these add to rows, (choices, rows).

        Every row has one variable on its left, and what that follows from on its right, which has rows before.
        """
        found = np.zeros((len(columns), self.rows.lhs.shape[1]))
        for row, factors in enumerate(self.rows.lhs):
            (own,) = np.flatnonzero(factors > 0)
            from_others = -np.where(factors < 0, factors, 0.0) @ found.T
            found[:, own] = np.maximum(found[:, own], self.rows.least[row] + columns[:, row] + from_others)
        return np.asarray(found[:, self.takes])


def block_program(
    tables: Tables, pipeline: Pipeline, limit: float, flavours: Sequence[Recompute], fastest: Sequence[Recompute]
) -> BlockProgram:
    """Return the program of a block.

    Args:
        tables: The decisions.
        pipeline: The schedule, whose passes they are.
        limit: Bytes per device, of which what is held is a share.
        flavours: What blocks may recompute, from fastest to slowest.
        fastest: By kind the least that blocks of other kinds recompute.
    """
    rows, each = Rows(tables, tuple(flavours)), Counting(tables, tuple(flavours))
    passes = PassRows(tables, pipeline, rows, each, fastest, HostRates(0.0, 0.0, 0.0)).write()
    main, count = each.main, each.counts[each.main]
    forward: dict[Name, float] = {_name(Take.FORWARD): 1.0}
    backward: dict[Name, float] = {_name(Take.BACKWARD): 1.0}
    for name, total in passes.items():
        if name[1] == main:
            once = 1.0 if name[0] == "forward" else 0.0
            forward[name], backward[name] = -once, once - total / count
    plain: dict[Name, float] = {name: -1.0 for name in passes if name[1] == main and name[0] != "again"}
    rows.add({_name(Take.PLAIN): 1.0, **plain})
    rows.add(forward)
    rows.add(backward, each.prices(main, {Slot.GRADIENT: pipeline.overlap.share}))
    kept, resident = np.zeros((2, len(flavours), len(tables.bytes)))
    room = limit - tables.folded.buffer_bytes
    for index, item in enumerate(tables.bytes):
        if item.kind == main:
            kept[:, index] = [(item.memory in KEPT[own]) / room for own in flavours]
            resident[:, index] = (item.memory in RESIDENT) / room
    rows.add({_name(Take.KEPT): 1.0}, amounts=kept)
    rows.add({_name(Take.RESIDENT): 1.0}, amounts=resident)
    rows.add({_name(Take.UPDATE): 1.0}, each.prices(main, {Slot.UPDATE: 1.0}))
    blocks = each.counts * (np.arange(len(each.counts)) == main)
    gradient, once = each.gradients(blocks)[-1] / count, each.reduced(blocks)[-1] / count
    waits = (each.ahead(blocks)[-1] + each.behind(blocks)[-1]) / count
    rows.add({_name(Take.LINK): 1.0}, waits + gradient)
    rows.add({_name(Take.GRADIENT): 1.0}, gradient)
    rows.add({_name(Take.ONCE): 1.0}, once)
    rows.buffers = tuple(own for own in buffers(tables) if own.kind == main)
    for use in (BufferUse.FORWARD, BufferUse.BACKWARD):
        held = [float(own.use in (use, BufferUse.REDUCING)) / room for own in rows.buffers]
        rows.add({_name(Take.BESIDE): 1.0}, amounts=np.zeros_like(kept), pairs=np.array(held))
        more = [float(own.use is use) / room for own in rows.buffers]
        rows.add({_name(Take.NEXT): 1.0}, amounts=np.zeros_like(kept), pairs=np.array(more))
    running = np.zeros_like(kept)
    running[:, _fullest(tables, main)] = 1 / room
    rows.add({_name(Take.RUNNING): 1.0}, amounts=running)
    comes = [(item.kind == main and item.memory is Memory.RECEIVED) / room for item in tables.bytes]
    rows.add({_name(Take.RECEIVED): 1.0}, amounts=np.broadcast_to(np.array(comes), kept.shape))
    program = rows.program({}, 0.0)
    return BlockProgram(program, np.array([rows.names[_name(take)] for take in Take]))


def _fullest(tables: Tables, kind: int) -> list[int]:
    """Return items that are there at one moment of a backward of a kind beside all that it keeps: what one op makes.

    It is the largest before the second op that reads what the forward has kept. Until then nothing of that is gone.
    """
    ops = tables.folded.kinds[kind].ops
    made = {name for op in ops if op.phase in (Phase.FORWARD, Phase.LOSS) for name in op.outputs if name}
    made.update(arrival.value for arrival in tables.folded.kinds[kind].arrivals if arrival.saved)
    found: dict[int, list[int]] = {}
    for index, item in enumerate(tables.bytes):
        if item.kind == kind and item.memory is Memory.TRANSIENT:
            found.setdefault(item.start, []).append(index)
    best: tuple[float, list[int]] = 0.0, []
    for position, op in enumerate(ops):
        if op.phase is not Phase.BACKWARD:
            continue
        own = found.get(position, [])
        largest = sum(float(tables.bytes[index].amounts.max()) for index in own)
        best = max(best, (largest, own))
        if made.intersection(op.inputs):
            break
    return best[1]


def _name(take: Take) -> str:
    """Return the name of the variable."""
    return SHARES.get(take, f"block {take.name}")
