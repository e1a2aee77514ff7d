"""A plan as pins: what a user edits, and pins in part."""

from collections.abc import Mapping

from autopar.discover import Rules
from autopar.folding.fold import Folded
from autopar.pins.records import BlockOffload, BlockRecompute, Choices, Pins
from autopar.plan import Plan
from autopar.recompute import Hosted
from autopar.recompute import Recompute as Flavour
from autopar.tactics import Offload, Pipeline, Recompute
from autopar.tactics.reading import tactics_of


def pins_of(plan: Plan, folded: Folded, rules: Rules, batch: Mapping[str, int]) -> Pins:
    """Return pins that leave a plan and nothing else.

    Args:
        plan: The plan.
        folded: The graph of its microbatch.
        rules: What its ops can do.
        batch: The batch dim of every value that has one.

    Raises:
        PlanError: If an op is placed as no rule allows.
    """
    groups = len({stage.devices for stage in plan.stages})
    placing = tuple(
        tactic
        for tactic in tactics_of(plan, folded, rules, batch)
        if not isinstance(tactic, Pipeline | Recompute | Offload)
    )
    recompute: list[BlockRecompute] = []
    trains = plan.job.mode == "train"
    for stage in plan.stages if trains else ():
        for block, flavour in enumerate(stage.flavours, stage.blocks[0]):
            first = block
            if recompute and recompute[-1].flavours == (str(flavour),):
                last = recompute.pop()
                first = last.blocks[0] if last.blocks else block
            recompute.append(BlockRecompute((str(flavour),), (first, block)))
    return Pins(
        Choices(
            stages=(groups,),
            mesh=(tuple((axis.name, axis.size) for axis in plan.mesh),),
            microbatches=(plan.num_microbatches,),
            schedule=(plan.schedule,),
            chunks=(len(plan.stages) // groups,),
            pp_inside=(True,) if "numbered" in plan.job.cluster else (),
            boundaries=tuple(stage.blocks[0] for stage in plan.stages[1:]),
            recompute=tuple(recompute),
            offload=_offload(plan) if trains else (),
            tactics=placing,
        )
    )


def _offload(plan: Plan) -> tuple[BlockOffload, ...]:
    """Return what lies in host memory: nothing, or by runs of blocks."""
    runs: list[tuple[tuple[str, ...], int, int]] = []
    for stage in plan.stages:
        for block, (flavour, away) in enumerate(zip(stage.flavours, stage.hosted, strict=True), stage.blocks[0]):
            named = [str(Hosted.ACTIVATIONS)] * (flavour is Flavour.OFFLOAD) + [str(Hosted.OPTIMIZER)] * away
            what = tuple(named) or ("none",)
            first = runs.pop()[1] if runs and runs[-1][0] == what else block
            runs.append((what, first, block))
    if len(runs) == 1 and runs[0][0] == ("none",):
        return (BlockOffload(("none",)),)
    return tuple(BlockOffload(what, (first, last)) for what, first, last in runs)
