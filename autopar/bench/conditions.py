"""Where and how a benchmark was run, so that it can be run again."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path

import autopar
from autopar.machine import usable_cores

PACKAGES = ("numpy", "onnx", "ortools", "highspy")
"""Packages whose versions decide what is found, and how fast."""

_CPU_INFO = Path("/proc/cpuinfo")  # Linux; elsewhere `platform.processor` has to do
_MODEL_NAME = "model name"


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a benchmark was run.

    Attributes:
        day: When.
        command: Full command line.
        cpu: Processor of the machine the search ran on.
        cores: Cores the process may use.
        memory: Bytes of that machine; 0 if unknown.
        system: Operating system.
        versions: Version of autopar, of Python and of each package in `PACKAGES`.
    """

    day: date
    command: str
    cpu: str
    cores: int
    memory: float
    system: str
    versions: Mapping[str, str] = field(hash=False)


def conditions(command: str) -> Conditions:
    """Return the conditions of a run on this machine, now.

    Args:
        command: The command line that was given.
    """
    versions = {"autopar": autopar.__version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    return Conditions(date.today(), command, _cpu(), usable_cores(), _memory(), platform.system(), versions)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == _MODEL_NAME:
                return value.strip()
    return platform.processor() or platform.machine()


def _memory() -> float:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0.0
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
