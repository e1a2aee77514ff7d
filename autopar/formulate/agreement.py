"""Whether a plan from a file places the ops of a model: its blocks, its ops in their order, and dims that divide."""

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
        folded: The graph of one of its microbatches.

    Raises:
        PlanError: If blocks, ops or dims are not those of the graph.
    """
    placed = plan.stages[-1].blocks[1]
    if placed != folded.num_blocks:
        raise PlanError(f"the plan has {placed} blocks, the model has {folded.num_blocks}", hint=_HINT)
    for variant in plan.all_variants:
        for block in variant.blocks:
            fault = next(_faults_of_block(block, variant, folded), None)
            if fault is not None:
                raise PlanError(fault, hint=_HINT)


def _faults_of_block(block: BlockPlan, variant: Variant, folded: Folded) -> Iterator[str]:
    """Yield what does not agree with the graph."""
    if not 0 <= block.kind < len(folded.kinds):
        yield f"the plan has a block kind {block.kind}, the model has {len(folded.kinds)}"
        return
    kind = folded.kinds[block.kind]
    strange = [index for index in block.instances if folded.chain[index] != block.kind]
    if strange:
        yield f"block {strange[0]} of the model is of kind {folded.chain[strange[0]]}, not {block.kind}"
    if [op.op for op in block.ops] != [op.name for op in kind.ops]:
        known = {op.name for op in kind.ops}
        others = [op.op for op in block.ops if op.op not in known]
        what = f"op {others[0]!r}, which is not there" if others else "some ops only, or in another order"
        yield f"the plan places {what} in block kind {block.kind}"
        return
    mesh = variant.device_mesh
    named: list[tuple[str, str]] = []
    for op, own in zip(kind.ops, block.ops, strict=True):
        for what, names, texts in (("inputs", op.inputs, own.inputs), ("outputs", op.outputs, own.outputs)):
            if len(names) != len(texts):
                yield f"the plan places {len(texts)} {what} of op {op.name!r}, which has {len(names)}"
                return
            named += zip(names, texts, strict=True)
    named += [(item.value, item.placement) for item in (*block.states, *block.borrowed, *block.arrivals)]
    named += [(item.value, item.placement) for item in block.departures]
    for name, text in named:
        value = folded.graph.values.get(name)
        if value is None and name:
            yield f"the plan places {name!r}, which the model does not have"
        elif value is not None and text and not fits(value.shape, parse_placements(text), mesh):
            yield f"{name!r} of shape {value.shape} cannot lie as {text} on mesh {mesh}"
