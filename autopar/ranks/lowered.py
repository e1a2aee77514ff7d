"""A program together with the graph it was made of, and what both say about the values of one block."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import JobError
from autopar.folding.block_interface import instance_names
from autopar.folding.fold import Folded
from autopar.ir.graph import Graph
from autopar.program.records import Compute, CrossingTable, Program, Segment, SegmentPhase, StageProgram
from autopar.shares import num_rows, of_row
from autopar.training.losses import LOSS_SCALE

Array = NDArray[Any]


def scaled_constants(graph: Graph, num_microbatches: Fraction) -> dict[str, Array]:
    """Return the constants of a graph, with the loss scaled to a mean over all microbatches."""
    constants = {name: np.asarray(array) for name, array in graph.constants.items()}
    scale = graph.metadata.get(LOSS_SCALE)
    if scale is not None:
        held = constants[scale]
        constants[scale] = np.asarray(np.divide(held, float(num_microbatches)), held.dtype)
    return constants


@dataclass(eq=False)
class Lowered:
    """A lowered plan, seen from its blocks.

    Attributes:
        program: The instructions.
        folded: The graph they were made of.
        mean_microbatches: Microbatches that the loss is a mean over, where the program is that of one share; None for
            those of the program.
    """

    program: Program
    folded: Folded
    mean_microbatches: Fraction | None = None

    def of_rank(self, rank: int) -> "Lowered":
        """Return what the rows that run as many microbatches as that of a rank run, each for itself."""
        program = self.program
        if not program.shares:
            return self
        group, position = self.place(rank)
        row = position * num_rows(program.shares) // program.stages[group].num_devices
        return Lowered(program.of_share(of_row(program.shares, row)), self.folded, program.mean_microbatches)

    @property
    def graph(self) -> Graph:
        """The graph of one microbatch."""
        return self.folded.graph

    @cached_property
    def segments(self) -> dict[tuple[int, SegmentPhase], Segment]:
        """Segments by kind of block and phase."""
        return self.program.table()

    @cached_property
    def crossings(self) -> CrossingTable:
        """Values that cross in pieces once per microbatch."""
        return self.program.crossing_table()

    @cached_property
    def blocks(self) -> list[tuple[StageProgram, int]]:
        """Stage and kind of every block of the chain."""
        return list(self.program.blocks())

    @cached_property
    def hosted_blocks(self) -> tuple[bool, ...]:
        """Whether the optimizer's state of each block of the chain lies in host memory."""
        return self.program.hosted_blocks

    @cached_property
    def names(self) -> tuple[Mapping[str, str], ...]:
        """Per block, the names of its values by their names in the representative of its kind."""
        return instance_names(self.folded)

    @cached_property
    def constants(self) -> dict[str, Array]:
        """The constants of the graph, with the loss scaled to a mean over all microbatches."""
        return scaled_constants(self.graph, self.mean_microbatches or self.program.mean_microbatches)

    @cached_property
    def _groups(self) -> tuple[int, ...]:
        return self.program.groups

    def segment(self, block: int, phase: SegmentPhase) -> Segment | None:
        """Return what a block does in a phase; None if nothing."""
        return self.segments.get((self.blocks[block][1], phase))

    def group(self, stage: int) -> int:
        """Return the group of devices of a stage; some stages share one."""
        return self._groups[stage]

    def stages_of(self, group: int) -> tuple[int, ...]:
        """Return the stages of a group of devices, its chunks in order."""
        return self.program.chunks[group]

    def blocks_of(self, stage: int) -> range:
        """Return the blocks of a stage."""
        first = sum(len(each.blocks) for each in self.program.stages[:stage])
        return range(first, first + len(self.program.stages[stage].blocks))

    def tensors(self, block: int, segment: Segment) -> dict[str, str]:
        """Return the tensor of the graph that each value at the edge of a block's segment is."""
        names = self.names[block]
        return {part.value: names[part.tensor] for part in segment.parts}

    def dtypes(self, segment: Segment) -> dict[str, str]:
        """Return the element type of every value of a segment."""
        values = self.graph.values
        found: dict[str, str] = {}
        if segment.phase in (SegmentPhase.AGAIN, SegmentPhase.BACKWARD):  # they read what their forward keeps
            found |= self.dtypes(self.segments[segment.kind, SegmentPhase.FORWARD])
        elif segment.phase is SegmentPhase.WEIGHT:  # and this one what either saved
            found |= self.dtypes(self.segments[segment.kind, SegmentPhase.BACKWARD])
        found |= {part.value: values[part.tensor].dtype for part in segment.parts}
        for instruction in segment.instructions:
            if isinstance(instruction, Compute):
                op = instruction.op
                for names, operands in ((op.inputs, instruction.inputs), (op.outputs, instruction.outputs)):
                    for name, operand in zip(names, operands, strict=True):
                        if operand is not None:
                            found.setdefault(operand.value, values[name].dtype)
            else:
                found[instruction.result.value] = found[instruction.operand.value]
        return found

    def place(self, rank: int) -> tuple[int, int]:
        """Return the group of a rank and the rank's position in its mesh.

        Raises:
            JobError: If there is no such rank.
        """
        for stage in self.program.stages[: self.program.num_groups]:
            if stage.devices[0] <= rank < stage.devices[1]:
                return stage.index, rank - stage.devices[0]
        raise JobError(
            f"rank {rank} has no device: the plan is for {self.program.num_devices}",
            hint=f"use --ranks {self.program.num_devices}",
        )
