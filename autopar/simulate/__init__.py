"""The event simulator: seconds and bytes of every stage of a program."""

from autopar.simulate.engine import simulate
from autopar.simulate.layout import Costs
from autopar.simulate.timeline import Event, MemoryPeak, MemorySample, Row, StageTimeline, Timeline
from autopar.simulate.trace import chrome_trace, write_chrome_trace

__all__ = [
    "Costs",
    "Event",
    "MemoryPeak",
    "MemorySample",
    "Row",
    "StageTimeline",
    "Timeline",
    "chrome_trace",
    "simulate",
    "write_chrome_trace",
]
