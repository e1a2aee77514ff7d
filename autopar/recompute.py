"""What a block keeps of its forward for its backward: the flavours of recompute; and what can lie in host memory.

A stage has one flavour for all its blocks, `"selective"`, or runs of them in the order of its blocks,
`"full*4 none*2"`. So it has one place for the optimizer's state of all its blocks, `"optimizer"` for host memory, or
runs of places, `"optimizer*4 none*2"`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, groupby
from math import fsum, nan

from autopar.errors import JobError, PlanError
from autopar.units import parse_whole


class Recompute(StrEnum):
    """What a block keeps, from most to least.

    `NONE` all that its backward reads; `SELECTIVE` what is dear to compute again: ops that are cheap for the bytes they
    leave behind run again before the backward; `FULL` what arrives: the whole forward runs again. `OFFLOAD` keeps what
    `NONE` does, but in host memory: it goes there during the forward and comes back before the backward.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    OFFLOAD = "offload"


ON_DEVICE = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""Flavours that need no host memory, from fastest to slowest."""

BY_SECONDS = (Recompute.NONE, Recompute.OFFLOAD, Recompute.SELECTIVE, Recompute.FULL)
"""All flavours, from fastest to slowest on a host link that takes no time."""


class Hosted(StrEnum):
    """What of a plan can lie in host memory: what blocks save (`Recompute.OFFLOAD`), or what they have between steps.

    The latter are the keys of `STATE_KINDS`.
    """

    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer"
    UPDATE = "update"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True)
class StateKind:
    """What of a block lies in host memory between steps besides the optimizer's state, and where the update runs.

    Attributes:
        sums: Whether sums of gradients lie there: they come and go around every backward.
        parameters: Whether parameters lie there: they come before every pass.
        updates_there: Whether the processors of the host run the update.
        is_in: What does so.
    """

    sums: bool
    parameters: bool
    updates_there: bool
    is_in: str


STATE_KINDS: Mapping[Hosted, StateKind] = {
    Hosted.OPTIMIZER: StateKind(False, False, False, "MaxText (optimizer_memory_host_offload)"),
    Hosted.UPDATE: StateKind(False, False, True, "Megatron-LM (--optimizer-cpu-offload)"),
    Hosted.GRADIENTS: StateKind(True, False, True, "DeepSpeed (offload_optimizer)"),
    Hosted.PARAMETERS: StateKind(True, True, True, "DeepSpeed (offload_param), FSDP2 (CPUOffloadPolicy)"),
}
"""What may lie in host memory between steps."""


RECOMPUTE_MODULES = (
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "activation",
    "mlp",
    "moe_act",
    "shared_experts",
    "moe",
)
"""Modules of a layer that selective recompute can be told to run again (`autopar.folding.recompute_modules`)."""

RESERVE = frozenset({Hosted.ACTIVATIONS, Hosted.OPTIMIZER})
"""What a search opens if nothing fits on the devices."""
LAST_RESERVE = frozenset({Hosted.UPDATE, Hosted.GRADIENTS, Hosted.PARAMETERS})
"""Of which it opens what leaves least on the devices if nothing fits with that either; each is tried on placements."""

_STATES = ", ".join(STATE_KINDS)
FLAVOURS = "none, offload, selective or full"
"""All of them, as errors name them."""


def parse_recompute(text: str, num_blocks: int) -> tuple[Recompute, ...]:
    """Return the flavour of each block of a stage.

    Raises:
        PlanError: If there is no such flavour, or the runs are not as long as the stage.

    >>> [str(flavour) for flavour in parse_recompute("full*2 none*1", 3)]
    ['full', 'full', 'none']
    """
    hint = f"it is {FLAVOURS}, or runs of blocks such as 'full*4 none*2'"
    return tuple(map(Recompute, _parse_runs("recompute", text, num_blocks, set(Recompute), hint)))


def format_recompute(flavours: tuple[Recompute, ...]) -> str:
    """Return the flavours of the blocks of a stage as text.

    >>> format_recompute((Recompute.FULL, Recompute.NONE, Recompute.NONE))
    'full*1 none*2'
    """
    return _format_runs(flavours)


def parse_hosted(text: str, num_blocks: int) -> tuple[bool, ...]:
    """Return whether state of each block of a stage lies in host memory; `hosted_state` says what of it.

    Raises:
        PlanError: If something else than state is to lie there, or the runs are not as long as the stage.

    >>> parse_hosted("optimizer*2 none*1", 3), parse_hosted("", 2)
    ((True, True, False), (False, False))
    """
    if not text:
        return (False,) * num_blocks
    hint = f"it is one of {_STATES}, or runs of blocks such as 'optimizer*4 none*2'; nothing if no block offloads"
    words = _parse_runs("offload", text, num_blocks, {"none", *STATE_KINDS}, hint)
    away = tuple(name != "none" for name in words)
    if not any(away):
        raise PlanError(f"offload {text!r} leaves all blocks of the stage on the device", hint=hint)
    if len(set(words) - {"none"}) > 1:
        raise PlanError(f"offload {text!r} has several kinds of state in host memory", hint="keep to one of them")
    return away


def hosted_state(text: str) -> Hosted:
    """Return what of a stage's state lies in host memory, given its text; that of the optimizer if nothing does.

    >>> print(hosted_state("none*2 parameters*1"))
    parameters
    """
    found = (run.partition("*")[0] for run in text.split())
    return next((Hosted(name) for name in found if name in STATE_KINDS), Hosted.OPTIMIZER)


def format_hosted(away: tuple[bool, ...], what: Hosted = Hosted.OPTIMIZER) -> str:
    """Return where the state of the blocks of a stage lies as text, empty if all of it is on the device.

    >>> format_hosted((True, True, False)), format_hosted((True,), Hosted.UPDATE)
    ('optimizer*2 none*1', 'update')
    """
    return _format_runs(tuple(str(what) if own else "none" for own in away)) if any(away) else ""


def parse_share(text: str) -> float:
    """Return how much of a state lies in host memory: "" for nothing, "optimizer" for all, "optimizer=0.5" for a part.

    Raises:
        JobError: If it is no such text, or no share above 0 and up to 1.

    >>> parse_share("optimizer=0.25"), parse_share("parameters"), parse_share("")
    (0.25, 1.0, 0.0)
    """
    if not text:
        return 0.0
    name, is_part, number = text.partition("=")
    try:
        share = float(number) if is_part else 1.0
    except ValueError:
        share = nan
    if name not in STATE_KINDS or not 0 < share <= 1:
        raise JobError(
            f"offload {text!r}", hint=f"give one of {_STATES}, or optimizer=0.5 with a share above 0 and up to 1"
        )
    return share


def share_of(text: str) -> Hosted:
    """Return what of a state lies in host memory, given its share as of `parse_share`.

    >>> print(share_of("update=0.5"), share_of(""))
    update optimizer
    """
    return Hosted(text.partition("=")[0]) if text else Hosted.OPTIMIZER


def first_share(sizes: Sequence[float], share: float) -> tuple[bool, ...]:
    """Return the first blocks of a stage whose state is nearest to a share of the state of all, at least one of them.

    Args:
        sizes: Bytes or numbers of the state of each block.
        share: Above 0 and up to 1.

    >>> first_share([1.0, 4.0, 4.0, 1.0], 0.5)
    (True, True, False, False)
    """
    sums, wanted = list(accumulate(sizes)), share * fsum(sizes)
    count = 1 + min(range(len(sums)), key=lambda block: abs(sums[block] - wanted))
    if share == 1:
        count = len(sums)
    return (True,) * count + (False,) * (len(sums) - count)


def _parse_runs(what: str, text: str, num_blocks: int, known: Collection[str], hint: str) -> list[str]:
    """Return the word of each block of a stage, of which `known` are there."""
    words: list[str] = []
    for run in text.split():
        name, star, count = run.partition("*")
        length = parse_whole(count) if star else num_blocks
        if name not in known or length is None:
            raise PlanError(f"{run!r} in {text!r} is no {what} of a stage", hint=hint)
        words += [name] * min(length, num_blocks + 1)
    if len(words) != num_blocks:
        raise PlanError(
            f"{what} {text!r} is for {'more' if len(words) > num_blocks else 'fewer'} blocks than the "
            f"{num_blocks} of the stage",
            hint=f"one {'flavour' if what == 'recompute' else 'word'} stands for all blocks; runs add up to them",
        )
    return words


def _format_runs(words: Sequence[str]) -> str:
    if len(set(words)) == 1:
        return str(words[0])
    return " ".join(f"{word}*{len(list(run))}" for word, run in groupby(words))
