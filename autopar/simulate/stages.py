"""The tasks of a stage in time: its blocks' segments end to end, in the order in which a pass goes through them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from autopar.cost import Overlap
from autopar.cost.overlap import state_seconds
from autopar.program.records import SegmentPhase, StageProgram
from autopar.recompute import Recompute
from autopar.schedule import Pass
from autopar.simulate.layout import NETWORK, Costs, Layout, Resource, beside, host_copy

Layouts = Mapping[tuple[int, SegmentPhase], Layout]
"""Layouts by kind of block and phase."""


@dataclass(frozen=True, slots=True)
class Part:
    """A segment within a task: block `index` of the stage runs `layout` from `offset` seconds after the start on."""

    offset: float
    index: int
    phase: SegmentPhase
    layout: Layout


_Placed = tuple[int, SegmentPhase, Layout | None]
"""Block of the stage, phase, and what runs there; None if nothing does."""


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
        """Yield when which link between devices is taken by what compute waits for: link, start and end in the task."""
        for part in self.parts:
            for span in part.layout.spans:
                if span.resource in NETWORK:
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
    def copy_seconds(self) -> float:
        """The part of it in which all wait for copies to or from host memory."""
        return fsum(part.layout.copy_seconds for part in self.parts)

    @property
    def host_link_seconds(self) -> float:
        """Time of such copies on the host link, hidden or not."""
        return fsum(part.layout.host_link_seconds for part in self.parts)

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


NO_UPDATES: Mapping[int, Layout] = {}
_TO_HOST = (SegmentPhase.SUM_OFFLOAD,)
_AROUND = (SegmentPhase.PARAMETER_FETCH, SegmentPhase.SUM_FETCH, *_TO_HOST)
"""Copies of persistent tensors around a backward."""
_STATE = (SegmentPhase.STATE_FETCH, SegmentPhase.STATE_OFFLOAD)
_AGAIN = {Recompute.SELECTIVE: SegmentPhase.AGAIN, Recompute.FULL: SegmentPhase.FORWARD}
"""What runs again before a backward, by flavour."""


def lay_out_stage(
    stage: StageProgram, layouts: Layouts, costs: Costs, on_host: Mapping[int, Layout] = NO_UPDATES
) -> StageLayout:
    """Return what a stage does in time, given the layouts of its kinds of blocks.

    Args:
        stage: The stage.
        layouts: The layouts of its kinds of blocks.
        costs: What everything takes.
        on_host: Updates that the host runs, by kind of block.
    """
    chain, overlap = list(enumerate(stage.blocks)), Overlap.of(costs.stack)
    hosted, kind_of_state = stage.hosted_blocks, stage.state_kind

    def each(phase: SegmentPhase) -> Iterator[_Placed]:
        return ((index, phase, layouts.get((kind, phase))) for index, kind in chain)

    def copies(index: int, kind: int, phase: SegmentPhase, what: Layout | None) -> _Placed:
        """Return copies beside a pass; None if there is nothing to copy."""
        alone = layouts.get((kind, phase))
        if alone is None or what is None:
            return index, phase, None
        added = float(overlap.copied(alone.host_link_seconds, what.seconds))
        return index, phase, beside(alone, what.seconds, added, late=phase is SegmentPhase.OFFLOAD)

    def stream(index: int, kind: int, phases: Sequence[SegmentPhase], what: Layout | None) -> list[_Placed]:
        """Return copies of persistent tensors around a pass, which it hides together: those before, and those after."""
        found = {phase: layouts[kind, phase] for phase in phases if hosted[index] and (kind, phase) in layouts}
        if what is None or not found:
            return []
        sent = sum(own.host_link_seconds for phase, own in found.items() if phase in _TO_HOST)
        taken = sum(own.host_link_seconds for phase, own in found.items() if phase not in _TO_HOST)
        left = added = float(overlap.copied(costs.cluster.known_host().both(sent, taken), what.seconds))
        placed: list[_Placed] = []
        for phase, own in found.items():
            late = phase in _TO_HOST
            cover = what.seconds + added if late else what.seconds
            placed.append((index, phase, beside(own, cover, 0.0 if late else left, late=late)))
            left = left if late else 0.0
        return placed

    def forwards() -> Iterator[_Placed]:
        for index, kind in chain:
            forward = layouts.get((kind, SegmentPhase.FORWARD))
            yield from stream(index, kind, (SegmentPhase.PARAMETER_FETCH,), forward)
            yield index, SegmentPhase.FORWARD, forward
            if stage.recompute[index] is Recompute.OFFLOAD:
                yield copies(index, kind, SegmentPhase.OFFLOAD, forward)

    def backwards() -> Iterator[_Placed]:
        for index, kind in reversed(chain):
            again, backward = _AGAIN.get(stage.recompute[index]), layouts.get((kind, SegmentPhase.BACKWARD))
            around = stream(index, kind, _AROUND, backward)
            yield from (own for own in around if own[1] not in _TO_HOST)
            if again is not None:
                yield index, again, layouts.get((kind, again))
            if stage.recompute[index] is Recompute.OFFLOAD:
                yield copies(index, kind, SegmentPhase.FETCH, backward)
            yield index, SegmentPhase.BACKWARD, backward
            yield from (own for own in around if own[1] in _TO_HOST)

    def updates() -> Iterator[_Placed]:
        for (index, kind), is_away in zip(chain, hosted, strict=True):
            update = layouts.get((kind, SegmentPhase.UPDATE))
            back, out = (layouts.get((kind, phase)) for phase in _STATE)
            if is_away and kind_of_state.updates_there:
                yield index, SegmentPhase.UPDATE, on_host.get(kind, update)
            elif is_away and update is not None and back is not None and out is not None:
                link = costs.cluster.known_host().both(out.host_link_seconds, back.host_link_seconds)
                added = float(overlap.copied(link, update.seconds))
                yield index, SegmentPhase.STATE_FETCH, beside(back, update.seconds, added, late=False)
                yield index, SegmentPhase.UPDATE, update
                yield index, SegmentPhase.STATE_OFFLOAD, beside(out, update.seconds + added, 0.0, late=True)
            else:
                yield index, SegmentPhase.UPDATE, update
        if stage.hosted_copies:  # of parameters that other stages own: what updates them is not simulated
            host, last, size = costs.cluster.known_host(), len(chain) - 1, stage.hosted_copies
            there, back = host_copy(host, size, out=True), host_copy(host, size, out=False)
            added = state_seconds(host, stage.what, size)
            yield last, SegmentPhase.STATE_FETCH, beside(back, 0.0, added, late=False)
            yield last, SegmentPhase.STATE_OFFLOAD, beside(there, added, 0.0, late=True)

    return StageLayout(
        passes={
            Pass.FORWARD: TaskLayout.of(forwards()),
            Pass.BACKWARD: TaskLayout.of(backwards()),
            Pass.WEIGHT: TaskLayout.of(
                (index, phase, layout) for index, phase, layout in reversed(list(each(SegmentPhase.WEIGHT)))
            ),
        },
        reduce={index: layout for index, _, layout in each(SegmentPhase.REDUCE) if layout is not None},
        update=TaskLayout.of(updates()),
    )
