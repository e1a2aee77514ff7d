"""The plan: its records, how it is read and written, and the laws a plan file has to keep."""

from autopar.plan.block_placements import (
    BlockPlan,
    DividedNumber,
    HaloRows,
    LocalKind,
    OpPlacement,
    ReplacedNumber,
    ValuePlacement,
)
from autopar.plan.job_info import DimSize, Job, ModelInfo
from autopar.plan.laws import check_variants
from autopar.plan.records import PLAN_VERSION, Plan
from autopar.plan.search_report import HistoryPoint, PhaseTime, Rival, SearchReport
from autopar.plan.stages import AxisUse, StagePlan, Variant
from autopar.plan.step_results import PartTimes, Remark, Simulated, StageMemory
from autopar.plan.texts import Exported, Text

__all__ = [
    "PLAN_VERSION",
    "AxisUse",
    "BlockPlan",
    "DimSize",
    "DividedNumber",
    "Exported",
    "HaloRows",
    "HistoryPoint",
    "Job",
    "LocalKind",
    "ModelInfo",
    "OpPlacement",
    "PartTimes",
    "PhaseTime",
    "Plan",
    "Remark",
    "ReplacedNumber",
    "Rival",
    "SearchReport",
    "Simulated",
    "StageMemory",
    "StagePlan",
    "Text",
    "ValuePlacement",
    "Variant",
    "check_variants",
]
