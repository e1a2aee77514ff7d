"""Costs: seconds and bytes of ops on shards, collectives, changes of placement, and resident state."""

from autopar.cost.collectives import Collective, devices_in_node, widest_tier
from autopar.cost.flops import op_flops
from autopar.cost.fusion import ALONE, Fused, Kernel
from autopar.cost.handover import Handed, Holding
from autopar.cost.model import CostModel
from autopar.cost.nearest import resolve_stack
from autopar.cost.overlap import BUCKET_BYTES, Bucketed, Overlap
from autopar.cost.policy import FP32, FSDP, MEGATRON_FP16, MIXED, POLICIES, DtypePolicy, load_policy
from autopar.cost.prices import Prices
from autopar.cost.pricing import priced, prices_of
from autopar.cost.reserve import default_limit, reserve_bytes, stage_limit
from autopar.cost.reshard import Move, Resharder, Reshards, reshards
from autopar.cost.stack import (
    IDEAL,
    NEAREST,
    SCALARS,
    Fit,
    FitSource,
    Fusion,
    Stack,
    bundled_stacks,
    load_stack,
    stack_from_dict,
)
from autopar.cost.traffic import is_view, op_bytes

__all__ = [
    "ALONE",
    "BUCKET_BYTES",
    "FP32",
    "FSDP",
    "IDEAL",
    "MEGATRON_FP16",
    "MIXED",
    "NEAREST",
    "POLICIES",
    "SCALARS",
    "Bucketed",
    "Collective",
    "CostModel",
    "DtypePolicy",
    "Fit",
    "FitSource",
    "Fused",
    "Fusion",
    "Handed",
    "Holding",
    "Kernel",
    "Move",
    "Overlap",
    "Prices",
    "Resharder",
    "Reshards",
    "Stack",
    "bundled_stacks",
    "default_limit",
    "devices_in_node",
    "is_view",
    "load_policy",
    "load_stack",
    "op_bytes",
    "op_flops",
    "priced",
    "prices_of",
    "reserve_bytes",
    "reshards",
    "resolve_stack",
    "stack_from_dict",
    "stage_limit",
    "widest_tier",
]
