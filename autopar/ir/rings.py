"""Ops that devices run together in a ring: which inputs go round, and what every device does with each block.

Devices of a mesh axis hold blocks of all inputs of an op. In step s device i holds the passed inputs of device i - s.
It runs the function of a pass on them, its own other inputs and what it has carried on from the step before. Some of
what is carried goes round with the passed inputs: gradients of keys and values, to which every device adds a term.
After as many steps as there are devices these are at home again.

A kind listed here is the function of its last pass. What is carried through that pass is the result of the op, but for
what `results` leaves out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.functions import DOMAIN

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """What a pass carries from step to step.

    Attributes:
        initial: What all its elements are before the first step.
        rows: Input of the op that has its dims, but for the last one.
        width: Input that has the last dim, too; None for a last dim of 1.
        travels: Whether it goes round with the passed inputs, `rows` being one of them; else it stays at a device.
    """

    initial: float
    rows: int
    width: int | None
    travels: bool = False

    def shape(self, inputs: Sequence[Shape]) -> Shape:
        """Return its shape, given those of the inputs of the op on one device."""
        return (*inputs[self.rows][:-1], 1 if self.width is None else inputs[self.width][-1])


@dataclass(frozen=True, slots=True)
class RingPass:
    """One way round.

    Attributes:
        kind: Function of domain `autopar`. Its inputs are those of the op that it reads, what the pass before has
            carried to its end, what is carried, and the positions of the first row of the device's own block and of the
            passed one (int64 scalars). Its outputs are what is carried on.
        reads: How many inputs of the op it reads, the first ones.
        carried: What is carried.
    """

    kind: str
    reads: int
    carried: tuple[Carried, ...]


@dataclass(frozen=True, slots=True)
class Ring:
    """How devices run an op in a ring.

    Attributes:
        passed: Inputs that go round.
        passes: The ways round, in order. All but the last one compute again what real kernels keep from the forward
            pass, the log-sum-exp of every query; nothing is paid for them.
        results: How many of what the last pass carries are outputs of the op, the first ones.
        without: Attributes of the op that have to be 0.
    """

    passed: tuple[int, ...]
    passes: tuple[RingPass, ...]
    results: int
    without: tuple[str, ...] = ()

    @property
    def travelling(self) -> tuple[int, ...]:
        """Outputs of the op that go round with the passed inputs."""
        carried = self.passes[-1].carried[: self.results]
        return tuple(index for index, each in enumerate(carried) if each.travels)


def _attention(name: str) -> dict[str, Ring]:
    """Return attention of (q, k, v), whose keys and values go round, and its gradient."""
    forward = RingPass(
        f"{DOMAIN}::Ring{name}", 3, (Carried(0.0, rows=0, width=2), Carried(float("-inf"), rows=0, width=None))
    )
    gradients = (Carried(0.0, 0, 0), Carried(0.0, 1, 1, travels=True), Carried(0.0, 2, 2, travels=True))
    backward = RingPass(f"{DOMAIN}::Ring{name}Grad", 4, gradients)
    limits = ("window", "chunk")
    return {
        forward.kind: Ring((1, 2), (forward,), 1, limits),
        backward.kind: Ring((1, 2), (forward, backward), 3, limits),
    }


RINGS: Mapping[str, Ring] = _attention("Attention") | _attention("CausalAttention")
"""By the kind that devices run in place of the op."""
