"""Ops that devices run together in a ring: which inputs go round, and what every device does with each block.

Devices of a mesh axis hold blocks of all inputs of an op. In step s device i holds the passed inputs of device i - s.
It runs the function of a pass on them, its own other inputs and what it has carried on from the step before. Some of
what is carried goes round with the passed inputs: gradients of keys and values, to which every device adds a term.
After as many steps as there are devices these are at home again. Where a window or chunks hide the keys of blocks that
are further away, the ring ends before these come; what travels then goes home at once.

A kind listed here is the function of its last pass. What is carried through that pass is the result of the op, but for
what `results` leaves out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
        limited: Whether its attributes `window` and `chunk` say how far back a query sees; 0 for all tokens before it.
    """

    passed: tuple[int, ...]
    passes: tuple[RingPass, ...]
    results: int
    without: tuple[str, ...] = ()
    limited: bool = False

    def steps(self, attrs: Iterable[tuple[str, object]], rows: int, devices: int) -> int:
        """Return after how many steps every device has seen all blocks that it needs.

        A device begins with its own block and goes back. Its first query sees furthest: `window` tokens, its own
        included, or back to where its chunk begins.

        Args:
            attrs: Attributes of the op.
            rows: Tokens of a block.
            devices: Devices of the ring.

        >>> RINGS["autopar::RingCausalAttention"].steps((("window", 9),), rows=4, devices=8)  # 4 own ones, 8 before
        3
        >>> RINGS["autopar::RingCausalAttention"].steps((("chunk", 8),), rows=4, devices=8)
        2
        """
        if not self.limited:
            return devices
        found, known = devices, dict(attrs)
        window, chunk = known.get("window", 0), known.get("chunk", 0)
        if isinstance(window, int) and window > 0:
            found = min(found, 1 + -(-(window - 1) // rows))
        if isinstance(chunk, int) and chunk > 0:
            begins = (device * rows // chunk * chunk // rows for device in range(devices))  # blocks where chunks begin
            found = min(found, 1 + max(device - block for device, block in enumerate(begins)))
        return found

    @property
    def travelling(self) -> tuple[int, ...]:
        """Outputs of the op that go round with the passed inputs."""
        carried = self.passes[-1].carried[: self.results]
        return tuple(index for index, each in enumerate(carried) if each.travels)


def _attention(name: str, *, limited: bool, sinks: bool = False, masked: bool = False) -> dict[str, Ring]:
    """Return attention of (q, k, v), whose keys and values go round, and its gradient.

    Args:
        name: Of the kind.
        limited: Whether windows and chunks limit what a query sees.
        sinks: Whether a logit per query head, the fourth input, takes part in the softmax.
        masked: Whether the fourth input is a mask, whose columns for all keys stay at a device.
    """
    reads = 3 + sinks + masked
    forward = RingPass(
        f"{DOMAIN}::Ring{name}", reads, (Carried(0.0, rows=0, width=2), Carried(float("-inf"), rows=0, width=None))
    )
    sums = (Carried(0.0, 0, 0), Carried(0.0, 1, 1, travels=True), Carried(0.0, 2, 2, travels=True))
    gradients = (*sums, Carried(0.0, 3, 3)) if sinks else sums
    backward = RingPass(f"{DOMAIN}::Ring{name}Grad", reads + 1, gradients)
    without = () if limited else ("window", "chunk", "softcap") if masked else ("window", "chunk")
    return {
        forward.kind: Ring((1, 2), (forward,), 1, without, limited),
        backward.kind: Ring((1, 2), (forward, backward), len(gradients), without, limited),
    }


HIDDEN_ATTENTION = f"{DOMAIN}::RingHiddenAttention"
"""Kind of attention whose mask hides keys by truth values; its gradient has a mask of numbers."""


def _hidden(masked: Mapping[str, Ring]) -> Ring:
    """Return attention whose mask is of truth values, given those whose mask is of numbers."""
    whole = masked[f"{DOMAIN}::RingMaskedAttention"]
    return replace(whole, passes=(replace(whole.passes[0], kind=HIDDEN_ATTENTION),))


RINGS: Mapping[str, Ring] = (
    _attention("Attention", limited=False)
    | _attention("CausalAttention", limited=True)
    | _attention("SinkAttention", limited=True, sinks=True)
    | (_MASKED := _attention("MaskedAttention", limited=False, masked=True))
    | {HIDDEN_ATTENTION: _hidden(_MASKED)}
)
"""By the kind that devices run in place of the op."""
