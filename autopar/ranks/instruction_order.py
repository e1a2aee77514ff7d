"""The order in which a rank carries out the instructions of a segment: long runs of compute, few waits.

A segment's instructions form a graph. Whatever can run before the next wait runs as one piece; then all collectives
whose operands are there start together, and those that compute waits for are waited for. Collectives that run beside
compute (traffic of gradients) are handed over as early as possible, and all that depends on them comes in a tail of
its own, so that the caller may put several into a bucket, and compute other things before it asks for them. A gradient
that goes through several collectives one after the other gets from one to the next without the others of its block.
Ops that ranks run in a ring are steps of their own, between the start of the collectives that are ready and the wait
for them.

All devices of a stage have the same instructions, hence the same order: collectives meet.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.program.bucket_order import departing
from autopar.program.records import Collective, Compute, Exchange, Instruction, SegmentPhase, Slice, defines, reads

Communication = Collective | Exchange


@dataclass(frozen=True, slots=True)
class Run:
    """Ops, and blocks cut out of copies, that run as one piece."""

    instructions: tuple[Compute | Slice, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """A collective starts."""

    instruction: Communication


@dataclass(frozen=True, slots=True)
class Wait:
    """The result of a started collective is waited for."""

    instruction: Communication


@dataclass(frozen=True, slots=True)
class Round:
    """An op that ranks run together, passing blocks round in a ring."""

    instruction: Compute


Step = Run | Start | Wait | Round


@dataclass(frozen=True, slots=True)
class Order:
    """Steps of a segment.

    Attributes:
        main: Steps that wait for no overlapped collective, though they start some.
        tail: The rest. A wait and what needs nothing but waits before it may come before steps that are listed earlier.
    """

    main: tuple[Step, ...]
    tail: tuple[Step, ...] = ()


def order(instructions: Sequence[Instruction], wanted: Collection[str], phase: SegmentPhase) -> Order:
    """Return the steps of a segment.

    Args:
        instructions: In an order that defines before it reads.
        wanted: Values that have to be there when `main` is done. Overlapped collectives that they come out of are
            waited for.
        phase: Of the segment.
    """
    made: dict[str, int] = {}
    needs: list[set[int]] = []
    late: set[int] = set()
    leaving = departing(instructions, phase, wanted)
    for index, instruction in enumerate(instructions):
        needs.append({made[operand.value] for operand in reads(instruction) if operand.value in made})
        made.update((operand.value, index) for operand in defines(instruction))
        if not needs[index].isdisjoint(late) or index in leaving:
            late.add(index)
    # the overlapped collectives that main starts: only their results are late
    early = {index for index in late if needs[index].isdisjoint(late)}
    main = _Scheduler(instructions, needs)
    main.run([index for index in range(len(instructions)) if index not in late], early)
    tail = _Scheduler(instructions, needs, done=main.done)
    tail.follow(sorted(early), late - early)
    return Order(tuple(main.steps), tuple(tail.steps))


def _runs_alone(instruction: Instruction) -> bool:
    """Whether a rank carries an instruction out without others."""
    return isinstance(instruction, Slice) or (isinstance(instruction, Compute) and instruction.ring is None)


class _Scheduler:
    """Collects steps; `done` are the instructions whose results are there."""

    def __init__(
        self, instructions: Sequence[Instruction], needs: Sequence[set[int]], done: Collection[int] = ()
    ) -> None:
        self._instructions = instructions
        self._needs = needs
        self.done = set(done)
        self.steps: list[Step] = []

    def wait(self, indices: Sequence[int]) -> None:
        """Wait for collectives."""
        for index in indices:
            instruction = self._instructions[index]
            assert isinstance(instruction, Communication), "only communication is waited for"
            self.steps.append(Wait(instruction))
        self.done.update(indices)

    def follow(self, started: Sequence[int], rest: Collection[int]) -> None:
        """Wait for started collectives one by one, and start others as soon as what leads to them is there.

        What leads to no collective runs in the end, in as few pieces as it can.
        """
        leads, waiting = set[int](), list(started)
        for index in sorted(rest, reverse=True):
            if index in leads or isinstance(self._instructions[index], Communication):
                leads |= {index, *self._needs[index]}
        chain = [index for index in sorted(rest) if index in leads]
        while waiting:
            self.wait([waiting.pop(0)])
            ready = [index for index in chain if _runs_alone(self._instructions[index])]
            self._run_piece(ready)
            for index in chain:
                instruction = self._instructions[index]
                if isinstance(instruction, Communication) and self._can_start(index) and index not in waiting:
                    self.steps.append(Start(instruction))
                    waiting.append(index)
            chain = [index for index in chain if index not in self.done and index not in waiting]
        self.run([index for index in sorted(rest) if index not in self.done], set())

    def _run_piece(self, indices: Sequence[int]) -> None:
        """Run in one piece those instructions whose operands are there, or are made in it."""
        piece: list[Compute | Slice] = []
        for index in indices:
            instruction = self._instructions[index]
            if self._needs[index] <= self.done:
                assert isinstance(instruction, Compute | Slice), "communication does not run"
                piece.append(instruction)
                self.done.add(index)
        if piece:
            self.steps.append(Run(tuple(piece)))

    def run(self, indices: Sequence[int], started: set[int]) -> None:
        """Carry out instructions; those in `started` are only started."""
        waiting = list(indices)
        unstarted = sorted(started)
        while waiting or unstarted:
            before = len(self.steps)
            self._run_piece([index for index in waiting if _runs_alone(self._instructions[index])])
            piece = len(self.steps) > before
            ready = [index for index in sorted([*waiting, *unstarted]) if self._can_start(index)]
            rounds = [index for index in waiting if self._can_go_round(index)]
            assert piece or ready or rounds, "instructions define before they read"
            for index in ready:
                instruction = self._instructions[index]
                assert isinstance(instruction, Communication), "the rest has run"
                self.steps.append(Start(instruction))
            for index in rounds:
                instruction = self._instructions[index]
                assert isinstance(instruction, Compute), "only ops go round"
                self.steps.append(Round(instruction))
                self.done.add(index)
            self.wait([index for index in ready if index not in started])
            unstarted = [index for index in unstarted if index not in ready]
            waiting = [index for index in waiting if index not in self.done]

    def _can_go_round(self, index: int) -> bool:
        instruction = self._instructions[index]
        is_round = isinstance(instruction, Compute) and not _runs_alone(instruction)
        return is_round and index not in self.done and self._needs[index] <= self.done

    def _can_start(self, index: int) -> bool:
        is_communication = isinstance(self._instructions[index], Communication)
        return is_communication and index not in self.done and self._needs[index] <= self.done
