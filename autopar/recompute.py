"""What a block keeps of its forward for its backward: the flavours of recompute; and what can lie in host memory.

A stage has one flavour for all its blocks, `"selective"`, or runs of them in the order of its blocks,
`"full*4 none*2"`.
"""

from enum import StrEnum
from itertools import groupby

from autopar.errors import PlanError
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
    """What of a plan can lie in host memory: what blocks save (`Recompute.OFFLOAD`), and the optimizer's state."""

    ACTIVATIONS = "activations"
    OPTIMIZER = "optimizer"


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

FLAVOURS = "none, offload, selective or full"
"""All of them, as errors name them."""


def parse_recompute(text: str, num_blocks: int) -> tuple[Recompute, ...]:
    """Return the flavour of each block of a stage.

    Raises:
        PlanError: If there is no such flavour, or the runs are not as long as the stage.

    >>> [str(flavour) for flavour in parse_recompute("full*2 none*1", 3)]
    ['full', 'full', 'none']
    """
    flavours: list[Recompute] = []
    for run in text.split():
        name, star, count = run.partition("*")
        length = parse_whole(count) if star else num_blocks
        if name not in set(Recompute) or length is None:
            raise PlanError(
                f"{run!r} in {text!r} is no recompute of a stage",
                hint=f"it is {FLAVOURS}, or runs of blocks such as 'full*4 none*2'",
            )
        flavours += [Recompute(name)] * min(length, num_blocks + 1)
    if len(flavours) != num_blocks:
        raise PlanError(
            f"recompute {text!r} is for {'more' if len(flavours) > num_blocks else 'fewer'} blocks than the "
            f"{num_blocks} of the stage",
            hint="one flavour stands for all blocks; runs add up to them",
        )
    return tuple(flavours)


def format_recompute(flavours: tuple[Recompute, ...]) -> str:
    """Return the flavours of the blocks of a stage as text.

    >>> format_recompute((Recompute.FULL, Recompute.NONE, Recompute.NONE))
    'full*1 none*2'
    """
    if len(set(flavours)) == 1:
        return str(flavours[0])
    return " ".join(f"{flavour}*{len(list(run))}" for flavour, run in groupby(flavours))
