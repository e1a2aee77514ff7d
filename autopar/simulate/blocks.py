"""What each block of a stage keeps and needs, block after block: equal blocks in equal company are looked at once.

Values saved and values handed on stay to the end of a segment, saved ones until the backward of their block reads them
last. A value that passes through several blocks is one tensor: the first block of the stage that keeps it pays for it.
What a block makes for blocks further away is kept until its own backward.

Without recompute a block keeps what its backward reads. With selective recompute it keeps what that can be made from;
the rest is there from the second run to the backward. With full recompute it keeps its inputs, until its backward is
done. What lies in host memory is on the device while the block's own passes run, and comes back as memory of its own.
Where the backward is split, what the weight pass of a block reads stays until then.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import fsum

from autopar.formulate.block_memory import State
from autopar.program.records import Offload, Operand, Segment, SegmentPhase, Table, kept_values
from autopar.recompute import Recompute
from autopar.simulate.liveness import Lifetimes, lifetimes, liveness_peak


@dataclass(frozen=True, slots=True)
class Peak:
    """A fullest moment, without resident tensors.

    Attributes:
        bytes: All of it but what follows.
        activations: The part that outlives the running task.
        gathered: Gathered parameters.
        reducing: Gradients under way to their reduction.
        unmade: Sums of gradients that have not been made yet, of those that count as resident.
    """

    bytes: float
    activations: float
    gathered: float = 0.0
    reducing: float = 0.0
    unmade: float = 0.0

    @property
    def total(self) -> float:
        """All that is there."""
        return self.bytes + self.gathered + self.reducing - self.unmade

    def on_top_of(self, kept: float) -> "Peak":
        """Return the moment with `kept` more bytes of activations."""
        return replace(self, bytes=self.bytes + kept, activations=self.activations + kept)

    def beside(self, gathered: float, reducing: float = 0.0, unmade: float = 0.0) -> "Peak":
        """Return the moment with what is there beside the task."""
        return replace(self, gathered=gathered, reducing=reducing, unmade=unmade)


NOTHING = Peak(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """What a block of a stage keeps and needs, in bytes of one microbatch.

    Attributes:
        kept: What it keeps from its forward to its backward, besides what earlier blocks of the stage keep.
        forward: Fullest moment of its forward, on top of what earlier blocks keep.
        backward: Fullest moment of its backward, on top of what earlier blocks keep and later ones have put off.
        late: What it keeps from its backward to its weight pass, where the schedule splits these.
        weight: Fullest moment of its weight pass, on top of what earlier blocks have put off.
        gathered: Parameters gathered for it.
        reducing: Gradients under way to their reduction once it has run.
        update: Fullest moment of its reductions and its update.
        hosted: What it keeps in host memory between its forward and its backward.
        early: Fullest moment of a backward that starts with the loss, before it needs parameters; `backward` is then
            that of the rest.
        summed: Sums of gradients it makes.
    """

    kept: float
    forward: Peak
    backward: Peak
    late: float
    weight: Peak
    gathered: float
    reducing: float
    update: float
    hosted: float = 0.0
    early: Peak = NOTHING
    summed: float = 0.0


@dataclass(frozen=True, slots=True)
class _Kind:
    """The segments of a kind by the memory of their values; the backward knows what was made before it."""

    forward: Lifetimes
    again: Lifetimes | None
    backward: Lifetimes | None
    backward_after_again: Lifetimes | None
    weight: Lifetimes | None
    once: tuple[Lifetimes, ...]


NEEDS = {Recompute.SELECTIVE: SegmentPhase.AGAIN, Recompute.OFFLOAD: SegmentPhase.OFFLOAD}
"""What a kind of block has to have for a flavour to differ from keeping all."""


class BlockMemories:
    """The memory of the kinds of blocks of a program.

    Args:
        table: Their segments.
        trains: Whether there are backwards.
    """

    def __init__(self, table: Table, trains: bool) -> None:
        self._table, self._trains = table, trains
        self._kinds: dict[int, _Kind] = {}
        self._known: dict[tuple[int, Recompute, State], tuple[BlockMemory, State]] = {}

    def enter(self, kind: int) -> State:
        """Return the state of a stage before its first block: nothing is kept yet."""
        return tuple(
            (position, False, False) for position in range(len(self._table[kind, SegmentPhase.FORWARD].inputs))
        )

    def walk(self, kinds: Sequence[int], flavours: Sequence[Recompute]) -> Iterator[BlockMemory]:
        """Yield the blocks of a stage in order."""
        state = self.enter(kinds[0])
        for kind, flavour in zip(kinds, flavours, strict=True):
            memory, state = self.advance(kind, flavour, state)
            yield memory

    def advance(self, kind: int, flavour: Recompute, state: State) -> tuple[BlockMemory, State]:
        """Return what a block needs, and the state of the stage after it."""
        key = (kind, flavour, state)
        if key not in self._known:
            self._known[key] = self._look_at(kind, flavour, state)
        return self._known[key]

    def _segments(self, kind: int) -> _Kind:
        if kind not in self._kinds:
            forward = lifetimes(self._table[kind, SegmentPhase.FORWARD])

            def follows(phase: SegmentPhase, shared: Mapping[str, str] = forward.shared) -> Lifetimes | None:
                segment = self._table.get((kind, phase)) if self._trains else None
                return None if segment is None else lifetimes(segment, shared)

            backward, again = follows(SegmentPhase.BACKWARD), follows(SegmentPhase.AGAIN)
            once = (follows(SegmentPhase.REDUCE), follows(SegmentPhase.UPDATE))
            self._kinds[kind] = _Kind(
                forward,
                again,
                backward,
                None if again is None else follows(SegmentPhase.BACKWARD, again.shared),
                None if backward is None else follows(SegmentPhase.WEIGHT, backward.shared),
                tuple(part for part in once if part is not None),
            )
        return self._kinds[kind]

    def _kept(self, kind: int, flavour: Recompute) -> dict[str, float]:
        """Return what a block keeps, by the memory it has."""
        if not self._trains:
            return {}
        segments, forward = self._segments(kind), self._table[kind, SegmentPhase.FORWARD]
        lives = segments.forward
        kept = lives.sizes(kept_values(self._table, kind, flavour)) | lives.sizes(forward.exports)
        needed = NEEDS.get(flavour)
        if flavour is Recompute.NONE or (needed is not None and (kind, needed) not in self._table):
            kept |= lives.hidden
        elif flavour is Recompute.SELECTIVE and segments.again is not None:
            kept |= {name: size for name, size in lives.hidden.items() if name not in segments.again.hidden}
        outside = {operand.value for operand in forward.external}
        return {name: size for name, size in kept.items() if name not in outside}

    def _copies(self, kind: int, flavour: Recompute) -> list[Offload]:
        """Return what a block copies to host memory in its forward."""
        segment = self._table.get((kind, SegmentPhase.OFFLOAD)) if self._trains else None
        if segment is None or flavour is not Recompute.OFFLOAD:
            return []
        return [copy for copy in segment.instructions if isinstance(copy, Offload)]

    def _look_at(self, kind: int, flavour: Recompute, state: State) -> tuple[BlockMemory, State]:
        segments, segment = self._segments(kind), self._table[kind, SegmentPhase.FORWARD]
        lives, kept = segments.forward, self._kept(kind, flavour)
        names = [operand.value for operand in segment.inputs]
        tensors = {name: tensor for name, (tensor, *_) in zip(names, state, strict=True)}
        held = {tensor for tensor, is_kept, _ in state if is_kept}
        waiting = {tensor for tensor, _, is_late in state if is_late}
        paid = frozenset(name for name, tensor in tensors.items() if tensor in held)
        fresh = sum(size for name, size in kept.items() if name not in paid)

        outputs = lives.sizes(segment.outputs)
        saved = self._kept(kind, Recompute.NONE) if flavour is Recompute.OFFLOAD else kept
        forward, live = liveness_peak(lives, _sizes(segment.inputs), saved.keys() | outputs.keys(), paid)
        following = (segments.again, segments.backward, segments.weight)
        memory = BlockMemory(
            fresh,
            Peak(forward, sum(size for name, size in kept.items() if name in live)),
            self._backward(kind, flavour, paid, kept, fresh),
            fsum(size for name, size in self._late(kind).items() if tensors.get(name) not in waiting),
            self._weight(kind, frozenset(name for name in names if tensors[name] in waiting)),
            max(part.gathered for part in (lives, *following) if part is not None),
            max((part.reducing for part in following[1:] if part is not None), default=0.0),
            max((liveness_peak(part, {}, ())[0] for part in segments.once), default=0.0),
            fsum(copy.bytes for copy in self._copies(kind, flavour)),
            self._early(kind, flavour, paid, kept),
            self._summed(kind),
        )
        held |= {tensors[name] for name in kept if name in tensors}
        late = self._late(kind)
        waiting |= {tensors[name] for name in late if name in tensors}
        after: list[tuple[int, bool, bool]] = []
        numbers: dict[object, int] = {}
        for operand in segment.outputs:
            name = lives.shared.get(operand.value, operand.value)
            is_kept = tensors[name] in held if name in tensors else name in kept
            is_late = tensors[name] in waiting if name in tensors else name in late
            origin: object = tensors.get(name, name)
            after.append((numbers.setdefault(origin, len(numbers)), is_kept, is_late))
        return memory, tuple(after)

    def _backward(
        self, kind: int, flavour: Recompute, paid: frozenset[str], kept: dict[str, float], fresh: float
    ) -> Peak:
        segments = self._segments(kind)
        if segments.backward is None:
            return NOTHING
        forward, backward = self._table[kind, SegmentPhase.FORWARD], self._table[kind, SegmentPhase.BACKWARD]
        lives, gradients = segments.forward, _sizes(backward.inputs)
        fetched = lives.sizes([copy.operand for copy in self._copies(kind, flavour)]).keys()
        free = (paid - fetched) | {operand.value for operand in forward.external}
        late: Set[str] = self._late(kind).keys()
        if flavour is Recompute.SELECTIVE and segments.again is not None and segments.backward_after_again is not None:
            again, after = segments.again, segments.backward_after_again
            saved = again.sizes(forward.saved) | lives.hidden
            late = late | {again.shared.get(name, name) for name in late}
            peaks = (
                liveness_peak(after, saved | gradients, _stays(after, backward, lives) | late, free),
                liveness_peak(again, kept | gradients, saved.keys() | gradients.keys(), free),
            )
            moments = (Peak(peak, sum(kept.get(name, 0.0) for name in live)) for peak, live in peaks)
            return max(moments, key=lambda moment: moment.bytes)
        saved, stays = lives.sizes(forward.saved) | lives.hidden, _stays(segments.backward, backward, lives) | late
        if flavour is Recompute.FULL:
            inputs = free | {operand.value for operand in forward.inputs}  # kept, and counted on top
            first, _ = liveness_peak(lives, {}, saved.keys(), inputs)
            peak, _ = liveness_peak(segments.backward, saved | gradients, stays, inputs)
            return Peak(max(first + sum(gradients.values()), peak), 0.0).on_top_of(fresh)
        since = segments.backward.first_gather if self._starts_with_loss(kind) else 0
        peak, live = liveness_peak(segments.backward, saved | gradients, stays, free, since=since)
        return Peak(peak, sum(kept.get(name, 0.0) for name in live))

    def _starts_with_loss(self, kind: int) -> bool:
        """Whether nothing is handed to the backward of a block, so that it starts with the gradient of the loss."""
        backward = self._table.get((kind, SegmentPhase.BACKWARD))
        return backward is not None and not backward.inputs

    def _early(self, kind: int, flavour: Recompute, paid: frozenset[str], kept: dict[str, float]) -> Peak:
        """Return the fullest moment of a backward before it needs parameters, if it starts with the loss."""
        segments = self._segments(kind)
        again = flavour is Recompute.SELECTIVE and segments.again is not None
        if segments.backward is None or flavour is Recompute.FULL or again or not self._starts_with_loss(kind):
            return NOTHING
        forward, backward = self._table[kind, SegmentPhase.FORWARD], self._table[kind, SegmentPhase.BACKWARD]
        lives = segments.forward
        fetched = lives.sizes([copy.operand for copy in self._copies(kind, flavour)]).keys()
        free = (paid - fetched) | {operand.value for operand in forward.external}
        saved = lives.sizes(forward.saved) | lives.hidden
        stays = _stays(segments.backward, backward, lives) | self._late(kind).keys()
        until = segments.backward.first_gather
        peak, live = liveness_peak(segments.backward, saved, stays, free, until=until)
        return Peak(peak, sum(kept.get(name, 0.0) for name in live))

    def _summed(self, kind: int) -> float:
        """Return the bytes of the sums of gradients that a block's backward makes."""
        phases = (SegmentPhase.BACKWARD, SegmentPhase.WEIGHT)
        found = (self._table.get((kind, phase)) for phase in phases)
        return fsum(store.value.bytes for segment in found if segment is not None for store in segment.stores)

    def _late(self, kind: int) -> dict[str, float]:
        """Return what a block keeps from its backward to its weight pass, by the memory it has.

        What an earlier block of the stage keeps until its backward counts here, too: it is there longer.
        """
        weight, segments = self._segments(kind).weight, self._segments(kind)
        if weight is None or segments.backward is None:
            return {}
        used = {name for names, _ in weight.steps for name in names}
        forward = segments.forward.sizes(self._table[kind, SegmentPhase.FORWARD].saved)
        backward = segments.backward.sizes(self._table[kind, SegmentPhase.BACKWARD].saved)
        return {name: size for name, size in (forward | backward).items() if name in used}

    def _weight(self, kind: int, paid: frozenset[str]) -> Peak:
        """Return the fullest moment of a weight pass; what earlier blocks keep as long is `paid`."""
        weight, late = self._segments(kind).weight, self._late(kind)
        if weight is None:
            return NOTHING
        peak, live = liveness_peak(weight, late, (), paid)
        return Peak(peak, sum(size for name, size in late.items() if name in live))


def _stays(lives: Lifetimes, segment: Segment, forward: Lifetimes) -> Set[str]:
    """Return the memory of what a backward hands on, and of what kernels left behind, which goes when it is done."""
    return lives.sizes(segment.outputs).keys() | forward.hidden.keys()


def _sizes(operands: Sequence[Operand]) -> dict[str, float]:
    return {operand.value: operand.bytes for operand in operands}
