"""Values on their way between stages.

What one group of devices sends to another arrives in the order in which it was sent. The receiver knows that order,
so it takes in whatever comes before the value it needs and keeps that for later: no two ranks can wait for each other
because one sends in another order than the other one receives.
"""

from collections.abc import Iterator, Sequence

from autopar.program.records import Crossing, Operand, SegmentPhase
from autopar.ranks.communicator import Communicator, Handle, Memory, Tensor
from autopar.ranks.crossings import Exchanged, exchanged, pack, unpack
from autopar.ranks.lowered import Lowered
from autopar.ranks.routes import Message, sent_in_order
from autopar.schedule import Task
from autopar.sharding import own_shape


class Mailbox:
    """What one rank sends to other groups, to its counterparts or in pieces, and receives from them.

    Args:
        lowered: The program.
        messages: All that crosses between stages.
        group: Group of devices of the rank.
        position: Its position in their mesh.
        communicator: Reaches the others.
        memory: Where tensors live.
    """

    def __init__(
        self,
        lowered: Lowered,
        messages: Sequence[Message],
        group: int,
        position: int,
        communicator: Communicator,
        memory: Memory,
    ) -> None:
        self._lowered = lowered
        self._messages = tuple(messages)
        self._group = group
        self._position = position
        self._communicator = communicator
        self._memory = memory
        self._exchanged: dict[int, Exchanged] = {}
        self._outgoing: dict[tuple[int, SegmentPhase], list[Message]] = {}
        for message in messages:
            if message.source == group:
                self._outgoing.setdefault((message.block, message.phase), []).append(message)
        self.begin()

    def begin(self) -> None:
        """Prepare for a step."""
        sources = {message.source for message in self._messages if message.target == self._group}
        self._coming: dict[int, Iterator[tuple[Message, Task]]] = {
            source: sent_in_order(self._lowered, self._messages, source) for source in sources
        }
        self._arrived: dict[tuple[Message, int], Tensor] = {}
        self._sends: list[tuple[Handle, Tensor]] = []

    def outgoing(self, block: int, phase: SegmentPhase) -> Sequence[Message]:
        """Return what a block sends in a phase."""
        return self._outgoing.get((block, phase), ())

    def peer(self, group: int) -> int:
        """Return the counterpart of this rank in another group."""
        return self._lowered.program.stages[group].devices[0] + self._position

    def send(self, group: int, tensor: Tensor) -> None:
        """Start to send; the tensor is kept until it has left."""
        kept = self._memory.contiguous(tensor)
        self._sends.append((self._communicator.send(kept, self.peer(group)), kept))

    def deliver(self, message: Message, tensor: Tensor) -> None:
        """Start to send a value to another group."""
        if message.crossing is None:
            self.send(message.target, tensor)
        else:
            self.send_pieces(message.crossing, tensor, message.dtype)

    def send_pieces(self, crossing: Crossing, tensor: Tensor, dtype: str) -> None:
        """Start to send what others need of this rank's block of a value that crosses."""
        for parcel in self._part_in(crossing).sends:
            kept = pack(parcel, tensor, dtype, self._memory)
            self._sends.append((self._communicator.send(kept, parcel.peer), kept))

    def receive_pieces(self, crossing: Crossing, dtype: str) -> Tensor:
        """Wait for this rank's block of a value that crosses."""
        part = self._part_in(crossing)
        block = self._memory.zeros(part.shape, dtype)
        for parcel in part.receives:
            flat = self._memory.empty((parcel.elements,), dtype)
            self._communicator.receive(flat, parcel.peer).wait()
            unpack(parcel, flat, block, adds=part.adds)
        return block

    def _part_in(self, crossing: Crossing) -> Exchanged:
        if id(crossing) not in self._exchanged:
            program = self._lowered.program
            self._exchanged[id(crossing)] = exchanged(crossing, program.stages, self._communicator.rank)
        return self._exchanged[id(crossing)]

    def receive(self, task: Task) -> Iterator[tuple[Message, Tensor]]:
        """Yield what others made for a task of this rank, waiting for it."""
        stage = self._lowered.stages_of(self._group)[task.chunk]
        for wanted in self._messages:
            if wanted.target == self._group and wanted.stage == stage and wanted.task is task.kind:
                yield wanted, self._take(wanted, task.microbatch)

    def _take(self, wanted: Message, microbatch: int) -> Tensor:
        while (wanted, microbatch) not in self._arrived:
            message, made = next(self._coming[wanted.source])
            if message.target == self._group:
                self._arrived[message, made.microbatch] = (
                    self.receive_from(message.source, self._shape(message.value), message.dtype)
                    if message.crossing is None
                    else self.receive_pieces(message.crossing, message.dtype)
                )
        return self._arrived.pop((wanted, microbatch))

    def _shape(self, value: Operand) -> tuple[int, ...]:
        """Return the shape of this rank's block of a value."""
        mesh = self._lowered.program.stages[self._group].mesh
        return own_shape(value.shape, value.placements, mesh, self._position)

    def receive_from(self, group: int, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Wait for the next tensor from the counterpart in another group."""
        tensor = self._memory.empty(shape, dtype)
        self._communicator.receive(tensor, self.peer(group)).wait()
        return tensor

    def finish(self) -> None:
        """Wait until everything has left."""
        for handle, _ in self._sends:
            handle.wait()
        self._sends.clear()
