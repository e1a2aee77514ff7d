"""The tasks of a stage in time: its blocks' segments end to end, in the order in which a pass goes through them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import fsum

from autopar.program.records import SegmentPhase, StageProgram
from autopar.recompute import Recompute
from autopar.schedule import Pass
from autopar.simulate.layout import Layout, Resource

Layouts = Mapping[tuple[int, SegmentPhase], Layout]
"""Layouts by kind of block and phase."""


@dataclass(frozen=True, slots=True)
class Part:
    """A segment within a task: block `index` of the stage runs `layout` from `offset` seconds after the start on."""

    offset: float
    index: int
    phase: SegmentPhase
    layout: Layout


@dataclass(frozen=True, slots=True)
class TaskLayout:
    """Segments end to end."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, segments: Iterable[tuple[int, SegmentPhase, Layout | None]]) -> "TaskLayout":
        """Place segments, given as block index, phase and layout, one after the other; None has nothing to do."""
        parts = []
        offset = 0.0
        for index, phase, layout in segments:
            if layout is not None:
                parts.append(Part(offset, index, phase, layout))
                offset += layout.seconds
        return cls(tuple(parts))

    @property
    def seconds(self) -> float:
        """Duration of the task."""
        return self.parts[-1].offset + self.parts[-1].layout.seconds if self.parts else 0.0

    def on_links(self) -> Iterator[tuple[Resource, float, float]]:
        """Yield when which link is taken by what compute waits for: link, start and end after the start of the task."""
        for part in self.parts:
            for span in part.layout.spans:
                if span.resource is not Resource.COMPUTE:
                    start = part.offset + span.offset
                    yield span.resource, start, start + span.seconds

    @property
    def compute_seconds(self) -> float:
        """The part of it in which kernels run."""
        return fsum(part.layout.compute_seconds for part in self.parts)

    @property
    def collective_seconds(self) -> float:
        """The part of it in which kernels wait for collectives."""
        return fsum(part.layout.collective_seconds for part in self.parts)

    @property
    def link_seconds(self) -> float:
        """Link time of what compute waits for, hidden or not."""
        return fsum(part.layout.link_seconds for part in self.parts)

    @property
    def again_seconds(self) -> float:
        """Kernels of the forward in a backward: those that run again."""
        return fsum(part.layout.compute_seconds for part in self.parts if part.phase in _AGAIN.values())

    @property
    def axis_seconds(self) -> Mapping[str, float]:
        """The seconds in which kernels wait for collectives, by mesh axis."""
        found: defaultdict[str, float] = defaultdict(float)
        for part in self.parts:
            for stop in part.layout.stops:
                found[stop.axis.name] += stop.seconds
            for axis, seconds in part.layout.exchanges:
                found[axis] += seconds
        return found


@dataclass(frozen=True, slots=True)
class StageLayout:
    """What a stage does in time.

    Attributes:
        passes: A forward, a backward, and a weight pass, which takes no time if the backward is not split.
        reduce: Reductions of each block by its index; blocks without any are left out.
        update: The update.
    """

    passes: Mapping[Pass, TaskLayout]
    reduce: Mapping[int, Layout]
    update: TaskLayout


_AGAIN = {Recompute.SELECTIVE: SegmentPhase.AGAIN, Recompute.FULL: SegmentPhase.FORWARD}
"""What runs again before a backward, by flavour."""


def lay_out_stage(stage: StageProgram, layouts: Layouts) -> StageLayout:
    """Return what a stage does in time, given the layouts of its kinds of blocks."""
    chain = list(enumerate(stage.blocks))

    def forwards(phase: SegmentPhase) -> Iterator[tuple[int, SegmentPhase, Layout | None]]:
        return ((index, phase, layouts.get((kind, phase))) for index, kind in chain)

    def backwards() -> Iterator[tuple[int, SegmentPhase, Layout | None]]:
        for index, kind in reversed(chain):
            again = _AGAIN.get(stage.recompute[index])
            if again is not None:
                yield index, again, layouts.get((kind, again))
            yield index, SegmentPhase.BACKWARD, layouts.get((kind, SegmentPhase.BACKWARD))

    def weights() -> Iterator[tuple[int, SegmentPhase, Layout | None]]:
        for index, kind in reversed(chain):
            yield index, SegmentPhase.WEIGHT, layouts.get((kind, SegmentPhase.WEIGHT))

    return StageLayout(
        passes={
            Pass.FORWARD: TaskLayout.of(forwards(SegmentPhase.FORWARD)),
            Pass.BACKWARD: TaskLayout.of(backwards()),
            Pass.WEIGHT: TaskLayout.of(weights()),
        },
        reduce={index: layout for index, _, layout in forwards(SegmentPhase.REDUCE) if layout is not None},
        update=TaskLayout.of(forwards(SegmentPhase.UPDATE)),
    )
