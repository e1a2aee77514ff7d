"""The event simulator: seconds and bytes of every stage of a program."""

from autopar.simulate.engine import simulate
from autopar.simulate.flat import Devices, simulate_flat
from autopar.simulate.layout import Costs
from autopar.simulate.path import PathStep
from autopar.simulate.simulation import EVEN, Stragglers
from autopar.simulate.step_arrays import StepArrays
from autopar.simulate.timeline import Event, MemoryPeak, MemorySample, Row, StageTimeline, Timeline
from autopar.simulate.trace import chrome_trace, write_chrome_trace

__all__ = [
    "EVEN",
    "Costs",
    "Devices",
    "Event",
    "MemoryPeak",
    "MemorySample",
    "PathStep",
    "Row",
    "StageTimeline",
    "StepArrays",
    "Stragglers",
    "Timeline",
    "chrome_trace",
    "simulate",
    "simulate_flat",
    "write_chrome_trace",
]
