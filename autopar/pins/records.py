"""Pins as plain records: what a plan may only be, and what it must not be."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import yaml

from autopar.configuration import divisors
from autopar.context_parallelism import ATTENTION_LIMITS, CONTEXT_KINDS, AttentionLimit, ContextKind
from autopar.degrees import SHARD
from autopar.errors import PinError
from autopar.tactics import Tactic, schedule_to

ROLES = ("dp", "ep", "cp", "tp")
"""What axes may be named for, and whose degrees can be pinned or forbidden, in the order of the axes of a mesh: the
last ones are neighbours."""

AXIS_NAMES = (*ROLES, SHARD)
"""What axes of a mesh may be named for: a role, or `shard` for data-parallel devices that share what ZeRO splits where
those of the axis `dp` hold copies (hybrid sharding, HSDP)."""

MOST_FREE = 3
"""Axes of a mesh that are named for no role: ops have a strategy for each combination of what they do on each."""

CONTEXTS = (*CONTEXT_KINDS, *(f"{kind}:{limit}" for kind in CONTEXT_KINDS for limit in ATTENTION_LIMITS))
"""What can be pinned or forbidden of context parallelism."""

Axes = tuple[tuple[str, int], ...]
"""A mesh: sizes by name, the axis whose devices are neighbours last; names may be empty if only sizes matter."""


@dataclass(frozen=True, slots=True)
class BlockRecompute:
    """What some blocks keep of their forward.

    Attributes:
        flavours: Any of "none", "selective", "full" and "offload".
        blocks: First and last block of the chain; None for the layers: the blocks that repeat, all if none does.
    """

    flavours: tuple[str, ...]
    blocks: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class BlockOffload:
    """What of some blocks lies in host memory.

    Attributes:
        what: "activations", "optimizer" or both, each of which may or may not if "none" is among them.
        blocks: First and last block of the chain; None for the activations of the layers and the optimizer of all.
    """

    what: tuple[str, ...]
    blocks: tuple[int, int] | None = None


RANGED = {"recompute": "flavours", "offload": "what"}
"""Decisions whose values may differ by range of blocks, and where a value says what it is."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Values of decisions; empty where nothing is said.

    Attributes:
        stages: Pipeline degrees: groups of devices that follow each other.
        mesh: Meshes of a stage.
        unequal: Whether stages have meshes of their own.
        dp: Data-parallel degrees; the axis of that name splits the batch.
        ep: Expert-parallel degrees; the axis splits experts.
        cp: Context-parallel degrees; the axis splits the sequence.
        tp: Tensor-parallel degrees; the axis splits matrices where they are used.
        sequence_parallel: Whether values between blocks are split along the sequence on the axis that is named tp;
            False has them so on no axis but one that is named cp.
        within_node: Names of mesh axes whose groups lie within one node.
        microbatches: Microbatches per step.
        microbatch_size: Samples of a microbatch, over all devices of a stage.
        schedule: Keys of `autopar.schedule.SCHEDULES`.
        chunks: Stages per group of devices.
        pp_inside: Whether data parallelism lies around pipelines.
        boundaries: Blocks of the chain at which a stage begins, besides the first.
        recompute: What blocks keep of their forward.
        offload: What lies in host memory.
        zero: Levels of ZeRO, parameter by parameter.
        hybrid_zero: Those over an axis named `shard`; of `zero` those above 0 unless they are stated.
        context: Kinds of context parallelism, `ring`, or of attention with a window, chunks, sinks or a mask alone:
            `ring:window`.
        tactics: Where tensors lie, as tactics say it.
    """

    stages: tuple[int, ...] = ()
    mesh: tuple[Axes, ...] = ()
    unequal: tuple[bool, ...] = ()
    dp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    sequence_parallel: tuple[bool, ...] = ()
    within_node: tuple[str, ...] = ()
    microbatches: tuple[int, ...] = ()
    microbatch_size: tuple[int, ...] = ()
    schedule: tuple[str, ...] = ()
    chunks: tuple[int, ...] = ()
    pp_inside: tuple[bool, ...] = ()
    boundaries: tuple[int, ...] = ()
    recompute: tuple[BlockRecompute, ...] = ()
    offload: tuple[BlockOffload, ...] = ()
    zero: tuple[int, ...] = ()
    hybrid_zero: tuple[int, ...] = ()
    context: tuple[str, ...] = ()
    tactics: tuple[Tactic, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no tuple.

        Raises:
            PinError: Which a single value is not.
        """
        for name, value in ((own.name, getattr(self, own.name)) for own in fields(self)):
            if not isinstance(value, tuple):
                raise PinError(f"{name}={value!r} is no tuple of values", hint=f"write {name}=({value!r},)")

    @property
    def named(self) -> tuple[str, ...]:
        """The decisions about which something is said."""
        return tuple(own.name for own in fields(self) if getattr(self, own.name))


@dataclass(frozen=True, slots=True)
class Item:
    """One pin: what can be dropped on its own.

    Attributes:
        section: "pin" or "forbid".
        key: The decision.
        index: Which tactic or range of blocks, where there are several; -1 for all that is said of the decision.
        text: How it is written.
    """

    section: str
    key: str
    index: int
    text: str

    def __str__(self) -> str:
        return f"{self.section} {self.text}"


@dataclass(frozen=True, slots=True)
class Pins:
    """What a plan has to keep to.

    Attributes:
        pin: Only these values are searched.
        forbid: None of these values is.
    """

    pin: Choices = field(default_factory=Choices)
    forbid: Choices = field(default_factory=Choices)

    def __bool__(self) -> bool:
        return bool(self.pin.named or self.forbid.named)

    @property
    def items(self) -> tuple[Item, ...]:
        """Every pin on its own, in the order of a file."""
        found = []
        for section, choices in (("pin", self.pin), ("forbid", self.forbid)):
            for key in choices.named:
                values = getattr(choices, key)
                parts = [(-1, values)] if key not in ("tactics", *RANGED) else [
                    (index, (value,)) for index, value in enumerate(values)
                ]  # fmt: skip
                found += [Item(section, key, index, as_text(key, part)) for index, part in parts]
        return tuple(found)

    def degrees(self, role: str, sizes: Iterable[int]) -> tuple[int, ...] | None:
        """Return what is left of the degrees of a role; None if nothing is said of it.

        Args:
            role: One of `ROLES`.
            sizes: Devices of a stage, each number that occurs: degrees divide it.
        """
        pinned, forbidden = getattr(self.pin, role), getattr(self.forbid, role)
        if not (pinned or forbidden):
            return None
        known = pinned or sorted({degree for size in sizes for degree in divisors(size)})
        return tuple(degree for degree in known if degree not in forbidden)

    @property
    def limits_context(self) -> bool:
        """Whether anything is said of kinds of context parallelism."""
        return bool(self.pin.context or self.forbid.context)

    def contexts(self, limits: Iterable[AttentionLimit] = ()) -> frozenset[ContextKind]:
        """Return the kinds of context parallelism that the pins allow for attention.

        Args:
            limits: What the attention has of windows, chunks, sinks and masks.
        """
        left = frozenset(CONTEXT_KINDS)
        for suffix in ("", *(f":{limit}" for limit in limits)):
            named = {f"{kind}{suffix}": kind for kind in CONTEXT_KINDS}
            pinned = {named[own] for own in self.pin.context if own in named}
            left = (left & pinned if pinned else left) - {named[own] for own in self.forbid.context if own in named}
        return left

    @property
    def roles(self) -> frozenset[str]:
        """The roles of whose degrees something is said."""
        return frozenset(role for role in ROLES if getattr(self.pin, role) or getattr(self.forbid, role))

    @property
    def sequence_parallel(self) -> frozenset[bool]:
        """What is left of whether values between blocks are split along the sequence."""
        return frozenset(self.pin.sequence_parallel or (True, False)) - frozenset(self.forbid.sequence_parallel)

    @property
    def unequal(self) -> frozenset[bool]:
        """What is left of whether stages have meshes of their own."""
        return frozenset(self.pin.unequal or (True, False)) - frozenset(self.forbid.unequal)

    def without(self, *items: Item) -> "Pins":
        """Return the pins but for some of them."""
        sections = {}
        for section, choices in (("pin", self.pin), ("forbid", self.forbid)):
            dropped: dict[str, set[int]] = {}
            for item in items:
                if item.section == section:
                    dropped.setdefault(item.key, set()).add(item.index)
            left = {
                key: () if -1 in indices else tuple(
                    value for index, value in enumerate(getattr(choices, key)) if index not in indices
                )
                for key, indices in dropped.items()
            }  # fmt: skip
            sections[section] = replace(choices, **left)
        return Pins(sections["pin"], sections["forbid"])

    def to_mapping(self) -> Mapping[str, Any]:
        """Return what a file would hold; `pins_from` reads it back equal.

        Raises:
            TacticError: If a tactic has a predicate, which has no text.
        """
        found = {}
        for section, choices in (("pin", self.pin), ("forbid", self.forbid)):
            if choices.named:
                found[section] = {key: _plain(key, getattr(choices, key)) for key in choices.named}
        return found


def _plain(key: str, values: tuple[Any, ...]) -> Any:
    if key == "tactics":
        return schedule_to(values)
    if key == "mesh":
        shown = [_plain_mesh(mesh) for mesh in values]
    elif key in RANGED:
        said = [(value.blocks, list(getattr(value, RANGED[key]))) for value in values]
        if any(blocks is not None for blocks, _ in said):
            return {"layers" if own is None else "-".join(map(str, own)): _single(names) for own, names in said}
        shown = [name for _, names in said for name in names]
    else:
        shown = list(values)
    return _single(shown)


def _plain_mesh(mesh: Axes) -> Any:
    if any(name for name, _ in mesh):
        return dict(mesh)
    return "x".join(str(size) for _, size in mesh)


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def as_text(key: str, values: tuple[Any, ...]) -> str:
    """Return one decision with its values as it stands in a file, on one line."""
    plain = _plain(key, values)
    if key == "tactics":
        return yaml.safe_dump(plain[0], default_flow_style=True, sort_keys=False, width=10**6).strip()[1:-1]
    return yaml.safe_dump({key: plain}, default_flow_style=True, sort_keys=False, width=10**6).strip()[1:-1]
