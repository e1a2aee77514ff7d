"""How the ops and tensors of a distinct block lie on the devices of a stage.

Placements are stored as the text they print as, one placement per mesh axis ("S(0)R"), so that a plan file can be read
and edited by hand.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DividedNumber:
    """A number inside an op that is smaller on a shard: an entry of a Reshape's target shape, the `group` of a Conv.

    Attributes:
        source: Index of the constant input that holds the number, or the name of an attribute.
        entry: Position in that tensor or list; 0 for a scalar.
        divisor: What it is divided by: the sizes of the mesh axes that split it, multiplied.
    """

    source: int | str
    entry: int
    divisor: int


@dataclass(frozen=True, slots=True)
class ReplacedNumber:
    """A number in an attribute that is another one on a shard: the padding of a convolution that has a halo."""

    attr: str
    entry: int
    value: int


@dataclass(frozen=True, slots=True)
class HaloRows:
    """Rows of the neighbouring devices that are put around a device's block of an input.

    Attributes:
        input: Index of the input.
        dim: Tensor dim, split over `axis` and no other.
        axis: Name of the mesh axis.
        before: Rows of the previous device.
        after: Rows of the next device.
        fill: "zero" or "lowest" (minus infinity), at the ends of the tensor.
    """

    input: int
    dim: int
    axis: str
    before: int
    after: int
    fill: str = "zero"


@dataclass(frozen=True, slots=True)
class LocalKind:
    """Another op that a device runs in place of an op, told where its block starts.

    Attributes:
        kind: Its kind; it has one more input than the op, where the device's block starts, and one more attribute,
            `size`, the number of rows of the whole tensor along `dim`.
        input: Index of the sharded input.
        dim: Tensor dim of it whose first row's position the op is told.
        axes: Names of the mesh axes that split it and for which the other op is needed, major first.
    """

    kind: str
    input: int
    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpPlacement:
    """How one op runs on the devices of a stage.

    Attributes:
        op: Its name in the representative block.
        inputs: Placements per input, data and constants included; "" for an absent one.
        outputs: Placements per output; "" for an unwanted one.
        divided: Numbers inside the op that one device's op has divided.
        replaced: Numbers in its attributes that are other ones on one device.
        halos: Rows of neighbours around blocks of inputs.
        local: What a device runs in place of the op; None if the op itself.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    divided: tuple[DividedNumber, ...] = ()
    replaced: tuple[ReplacedNumber, ...] = ()
    halos: tuple[HaloRows, ...] = ()
    local: LocalKind | None = None


@dataclass(frozen=True, slots=True)
class ValuePlacement:
    """Placement of a persistent tensor, or of the copy of a value that several ops share."""

    value: str
    placement: str


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Decisions for one distinct block; every instance of the block follows its representative, op by op.

    Attributes:
        kind: Id of the distinct block.
        representative: Index of the instance whose op and value names are used.
        instances: Indices of all instances in the chain of blocks.
        ops: Placements per op.
        states: Placements of the block's parameters between steps.
        borrowed: Placements of parameters of other blocks that this one reads (tied embeddings).
        arrivals: Values that come from other blocks, as this block receives them.
        departures: Values that go to other blocks, as they leave this one.
        copies: Copies that several ops of a phase share, named `value@kind/phase`.
        selective: Names of the ops that run again in an instance that recomputes selectively; what they make is not
            kept.
    """

    kind: int
    representative: int
    instances: tuple[int, ...]
    ops: tuple[OpPlacement, ...]
    states: tuple[ValuePlacement, ...]
    borrowed: tuple[ValuePlacement, ...] = ()
    arrivals: tuple[ValuePlacement, ...] = ()
    departures: tuple[ValuePlacement, ...] = ()
    copies: tuple[ValuePlacement, ...] = ()
    selective: tuple[str, ...] = ()
