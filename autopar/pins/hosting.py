"""What pins say of host memory, and of what blocks keep: flavours by block, and where the optimizer's state may lie.

Nothing lies in host memory unless it is pinned or nothing fits without (`Constraints.reserve`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import PinError
from autopar.folding.fold import Folded
from autopar.pins.records import RANGED, BlockOffload, BlockRecompute, Item, Pins
from autopar.recompute import BY_SECONDS, LAST_RESERVE, ON_DEVICE, STATE_KINDS, Hosted, Recompute
from autopar.tactics.stages import layers

Keeps = list[frozenset[Recompute]]
States = list[frozenset[bool]]


@dataclass(frozen=True, slots=True)
class Hosting:
    """What is left of what blocks keep and of what lies in host memory; see `Constraints`."""

    keeps: tuple[frozenset[Recompute], ...] = ()
    hosted: frozenset[Hosted] = frozenset()
    reserve: frozenset[Hosted] = frozenset()
    states: tuple[frozenset[bool], ...] = ()
    last: frozenset[Hosted] = frozenset()


def hosting(pins: Pins, folded: Folded, *, trains: bool, host: bool) -> Hosting:
    """Return what pins leave.

    Args:
        pins: The pins.
        folded: The graph of a microbatch.
        trains: Whether there is a backward pass and an update.
        host: Whether it is known how devices reach host memory.

    Raises:
        PinError: If something is pinned to host memory that is unknown, or nothing is left for a block.
    """
    if not trains:
        return Hosting()
    hosted = frozenset(_opened(pins))
    if hosted and not host:
        raise PinError(
            f"{' and '.join(sorted(hosted))} cannot lie in host memory: the cluster does not say how devices reach it",
            hint="leave it out, or give the cluster a host with tier, memory, devices, to_host and to_device",
        )
    never = {name for item in pins.forbid.offload if item.blocks is None for name in item.what}
    if len(hosted & STATE_KINDS.keys()) > 1:
        raise PinError(
            f"{' and '.join(sorted(hosted & STATE_KINDS.keys()))} are kinds of state in host memory",
            hint="pin one of them: a plan has one kind",
        )
    streamed = [own for own in STATE_KINDS if own in hosted and STATE_KINDS[own].sums]
    if Hosted.ACTIVATIONS in hosted and streamed:
        raise PinError(
            f"activations and {streamed[0]} would pass over the host link together",
            hint="pin one of them",
        )
    reserve, last = _reserves(never) if host and not pins.pin.offload else (frozenset[Hosted](), frozenset[Hosted]())
    reserve -= hosted
    if not (pins.pin.recompute or pins.forbid.recompute or pins.pin.offload or pins.forbid.offload):
        return Hosting(reserve=reserve, last=last)
    keeps, states = _keeps(pins, folded), _states(pins, folded.num_blocks)
    known = [own for own in BY_SECONDS if own is not Recompute.OFFLOAD or Hosted.ACTIVATIONS in hosted | reserve]
    for block, (flavours, lies) in enumerate(zip(keeps, states, strict=True)):
        if flavours.isdisjoint(known) or not lies:
            keys = ("recompute", "offload") if lies else ("offload",)
            guilty = [f"'{item}'" for item in _speaking_of(block, pins, folded) if item.key in keys]
            verb = "leave" if len(guilty) > 1 else "leaves"
            raise PinError(
                f"{' and '.join(guilty)} {verb} nothing for block {block}",
                hint=f"drop one of them; what a block keeps is one of {', '.join(known)}",
            )
    if any(own.isdisjoint(ON_DEVICE) for own in keeps):  # there is no plan without
        hosted |= {Hosted.ACTIVATIONS}
        reserve -= hosted
    told = any(own != frozenset({False, True}) for own in states)
    return Hosting(tuple(keeps), hosted, reserve, tuple(states) if told else (), last)


def _reserves(never: Collection[str]) -> tuple[frozenset[Hosted], frozenset[Hosted]]:
    """Return the kinds of state that may lie in host memory if nothing fits: at first, and as the last resort.

    Of the kinds of state that may lie there the least one is opened first, and parameters last.
    """
    kinds = [own for own in STATE_KINDS if own not in never]
    if forbids_state(never):
        kinds = []
    first = {*kinds[:1]} | (set() if Hosted.ACTIVATIONS in never else {Hosted.ACTIVATIONS})
    if kinds and STATE_KINDS[kinds[0]].sums:  # they and activations would pass over the link together
        first = {kinds[0]}
    return frozenset(first), LAST_RESERVE & frozenset(kinds[1:])


def forbids_state(what: Collection[str]) -> bool:
    """Whether a pin forbids all state in host memory: that of the optimizer alone stands for all kinds."""
    named = STATE_KINDS.keys() & {*what}
    return named == {Hosted.OPTIMIZER} or len(named) == len(STATE_KINDS)


def blocks_of(item: BlockRecompute | BlockOffload, folded: Folded) -> Sequence[int]:
    """Return the blocks a pin speaks of."""
    return layers(folded) if item.blocks is None else range(item.blocks[0], item.blocks[1] + 1)


def _speaking_of(block: int, pins: Pins, folded: Folded) -> Iterator[Item]:
    """Yield the pins that say what a block keeps, or what of it lies in host memory."""
    for item in pins.items:
        if item.key in RANGED:
            own = getattr(pins.pin if item.section == "pin" else pins.forbid, item.key)[item.index]
            blocks = blocks_of(own, folded) if item.key == "recompute" else _spoken(own, folded.num_blocks)
            if block in blocks:
                yield item


def _opened(pins: Pins) -> Iterator[Hosted]:
    """Yield what is pinned to lie in host memory, or to be allowed to."""
    if any(Recompute.OFFLOAD in item.flavours for item in pins.pin.recompute):
        yield Hosted.ACTIVATIONS
    for item in pins.pin.offload:
        yield from (own for own in Hosted if own in item.what)


def _keeps(pins: Pins, folded: Folded) -> Keeps:
    """Return for each block what it may keep."""
    keeps: Keeps = [frozenset(BY_SECONDS)] * folded.num_blocks
    for item in pins.pin.recompute:
        for block in blocks_of(item, folded):
            keeps[block] = keeps[block] & {Recompute(flavour) for flavour in item.flavours}
    for item in pins.forbid.recompute:
        for block in blocks_of(item, folded):
            keeps[block] = keeps[block] - {Recompute(flavour) for flavour in item.flavours}
    for own in pins.pin.offload:
        if Hosted.ACTIVATIONS not in own.what:
            _close(keeps, own)
        elif "none" not in own.what:
            for block in blocks_of(own, folded):
                keeps[block] = keeps[block] & {Recompute.OFFLOAD}
    for own in pins.forbid.offload:
        if Hosted.ACTIVATIONS in own.what:
            _close(keeps, own)
    return keeps


def _close(keeps: Keeps, item: BlockOffload) -> None:
    for block in _spoken(item, len(keeps)):
        keeps[block] = keeps[block] - {Recompute.OFFLOAD}


def _spoken(item: BlockOffload, num_blocks: int) -> range:
    """Return the blocks for which a pin says what does not lie in host memory, and where the optimizer's state does."""
    return range(num_blocks) if item.blocks is None else range(item.blocks[0], item.blocks[1] + 1)


def _states(pins: Pins, num_blocks: int) -> States:
    """Return for each block whether its optimizer's state may lie in host memory, and on the device."""
    states: States = [frozenset({False, True})] * num_blocks
    for item in pins.pin.offload:
        wanted = {any(own in item.what for own in STATE_KINDS)}
        if "none" in item.what:
            wanted |= {False}
        for block in _spoken(item, num_blocks):
            states[block] = states[block] & wanted
    for item in pins.forbid.offload:
        if forbids_state(item.what):
            for block in _spoken(item, num_blocks):
                states[block] = states[block] - {True}
    return states
