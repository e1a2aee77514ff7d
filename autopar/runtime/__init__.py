"""Programs executed: the numbers a plan computes, to be held against those of the unpartitioned model."""

from autopar.runtime.reference import StepResult, run_step

__all__ = ["StepResult", "run_step"]
