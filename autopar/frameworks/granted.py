"""What a prediction takes for granted of the software that runs a plan, and a configuration does not ask for."""

from collections.abc import Mapping

from autopar.cost.overlap import full_bucket
from autopar.frameworks.facts import Facts
from autopar.plan import ContextKind
from autopar.sharding import Axis
from autopar.workload import job_stack

OVERLAPPED_GRADIENTS = "gradients are reduced while the backward runs"
OVERLAPPED_GATHERS = "parameters are gathered while the blocks before compute"
CONTEXT: Mapping[ContextKind, str] = {
    "ring": "context parallelism passes keys and values round in a ring beside attention, whose work zigzag balances",
    "gather": "context parallelism gathers keys and values whole in every layer",
    "ulysses": "context parallelism exchanges positions for heads by all-to-all",
}
CHUNKED_COLLECTIVES = "collectives of tensor parallelism run in chunks beside the products next to them"
EXPERTS_BY_ALL_TO_ALL = "tokens go to experts and back by all-to-all"


def hides_tp(facts: Facts) -> bool:
    """Return whether a plan has collectives of tensor parallelism that its stack runs beside products."""
    return facts.tp > 1 and facts.sequence_parallel and job_stack(facts.plan.job).hides_tp


def taken_for_granted(facts: Facts, asked: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return what the simulator assumes of the software, a sentence each.

    Args:
        facts: The plan.
        asked: Sentences of this module that the configuration does ask for.
    """
    found: list[str] = []
    data = facts.dp * facts.cp
    if data > 1:
        found.append(OVERLAPPED_GRADIENTS)
        if facts.bucket is None:
            found.append(f"gradients are reduced in buckets of {full_bucket(Axis('dp', data, 1)) / 1e6:g} MB")
    if facts.zero and data > 1:
        found.append(OVERLAPPED_GATHERS)
    if hides_tp(facts):
        found.append(CHUNKED_COLLECTIVES)
    elif facts.tp > 1:
        found.append("collectives of tensor parallelism in the backward run beside weight-gradient products")
    if facts.cp > 1:
        found += [CONTEXT[kind] for kind in facts.cp_kinds]
    if facts.ep > 1:
        found.append(EXPERTS_BY_ALL_TO_ALL)
    if facts.sizes is not None and facts.sizes.experts:
        limited = "an expert takes a limited number of tokens (the zoo's capacity factor) and drops the others"
        found.append(limited if facts.sizes.decoder is None else "tokens choose all experts equally often")
    if job_stack(facts.plan.job).attention == "fused":
        found.append("attention is one kernel that keeps no scores (flash attention)")
    if facts.pp > 1:
        found.append("no stage waits for a norm of all gradients before its update")
    return tuple(sentence for sentence in found if sentence not in asked)
