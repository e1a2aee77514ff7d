"""Check that a plan loaded from a file fits the model: same blocks, same ops in the same order, divisible dims.

`check_blocks` raises a `PlanError` that names the first mismatch.
"""

from collections.abc import Iterator

from autopar.errors import PlanError
from autopar.folding.fold import Folded
from autopar.plan import BlockPlan, Plan, Variant
from autopar.sharding import fits, parse_placements

_HINT = "the plan was edited: solve again"


def check_blocks(plan: Plan, folded: Folded) -> None:
    """Check that a plan places the ops of a graph.

    Args:
        plan: The plan.
        folded: The folded graph of one microbatch of the plan.

    Raises:
        PlanError: If the blocks, the ops or the sharded dims of the plan do not fit the graph.
    """
    num_planned = plan.stages[-1].blocks[1]
    if num_planned != folded.num_blocks:
        raise PlanError(f"the plan has {num_planned} blocks, the model has {folded.num_blocks}", hint=_HINT)
    for variant in plan.all_variants:
        for block in variant.blocks:
            mismatch = next(_block_mismatches(block, variant, folded), None)
            if mismatch is not None:
                raise PlanError(mismatch, hint=_HINT)


def _block_mismatches(block: BlockPlan, variant: Variant, folded: Folded) -> Iterator[str]:
    """Yield a description of every mismatch between a block of a plan and the graph."""
    if not 0 <= block.kind < len(folded.kinds):
        yield f"the plan has a block kind {block.kind}, the model has {len(folded.kinds)}"
        return
    kind = folded.kinds[block.kind]
    mismatched = [index for index in block.instances if folded.chain[index] != block.kind]
    if mismatched:
        yield f"block {mismatched[0]} of the model is of kind {folded.chain[mismatched[0]]}, not {block.kind}"
    if [op.op for op in block.ops] != [op.name for op in kind.ops]:
        known = {op.name for op in kind.ops}
        others = [op.op for op in block.ops if op.op not in known]
        what = (
            f"op {others[0]!r}, which the model does not have" if others else "only some ops, or ops in another order,"
        )
        yield f"the plan places {what} in block kind {block.kind}"
        return
    mesh = variant.device_mesh
    placements: list[tuple[str, str]] = []
    for op, own in zip(kind.ops, block.ops, strict=True):
        for what, names, texts in (("inputs", op.inputs, own.inputs), ("outputs", op.outputs, own.outputs)):
            if len(names) != len(texts):
                yield f"the plan places {len(texts)} {what} of op {op.name!r}, which has {len(names)}"
                return
            placements += zip(names, texts, strict=True)
    placements += [(item.value, item.placement) for item in (*block.states, *block.borrowed, *block.arrivals)]
    placements += [(item.value, item.placement) for item in block.departures]
    for name, text in placements:
        value = folded.graph.values.get(name)
        if value is None and name:
            yield f"the plan places {name!r}, which the model does not have"
        elif value is not None and text and not fits(value.shape, parse_placements(text), mesh):
            yield f"{name!r} of shape {value.shape} cannot be placed as {text} on mesh {mesh}"
