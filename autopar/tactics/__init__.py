"""Tactics: sharding strategies composed by hand, each applied to a model and propagated by the discovered rules."""

from autopar.tactics.files import TACTICS, format_schedule, load_schedule, schedule_from
from autopar.tactics.records import (
    Automatic,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Megatron,
    Offload,
    Pipeline,
    Place,
    Recompute,
    Replicate,
    SequenceParallel,
    Shard,
    Tactic,
    ZeRO,
)

__all__ = [
    "TACTICS",
    "Automatic",
    "ContextParallel",
    "DataParallel",
    "ExpertParallel",
    "Megatron",
    "Offload",
    "Pipeline",
    "Place",
    "Recompute",
    "Replicate",
    "SequenceParallel",
    "Shard",
    "Tactic",
    "ZeRO",
    "format_schedule",
    "load_schedule",
    "schedule_from",
]
