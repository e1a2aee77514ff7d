"""`autopar doctor`: what this installation consists of, and whether its parts are there."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopar import __version__
from autopar.cli.options import cache_options, echo_json, json_option, resolve_cache_dir
from autopar.display import show_progress
from autopar.machine import usable_cores
from autopar.units import format_bytes

if TYPE_CHECKING:
    from autopar.solvers import Solver

_PACKAGES = ("numpy", "numba", "onnx", "highspy", "ortools", "pulp", "msgspec", "networkx", "click", "rich")
_EXTRAS = {
    "torch": "from_torch, `autopar run` on processes",
    "onnxruntime": "`autopar run`",
    "transformers": "hf: models",
    "onnxscript": "from_torch, hf: models",
    "jax": "from_jax",
}

_KEPT = ("rules-*.json", "huggingface/*.onnx", "results/*")
"""What the cache holds: rules by version, models made of configurations, answers."""


@dataclass(frozen=True, slots=True)
class Cache:
    """The folder results are kept in: where it is, and how many files of how many bytes it has."""

    folder: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Checkup:
    """What was found.

    Attributes:
        autopar: Version of this program.
        python: Version of Python.
        system: Operating system and processor.
        cores: Processors this process may use.
        memory: Bytes of main memory; 0 where the system does not tell.
        packages: Versions of the packages it needs; "" for one that is missing.
        extras: Versions of those it can use; "" for one that is not installed.
        solvers: Solvers, and whether each solved a small problem: "works", or why not.
        cache: The cache; None if it is switched off.
        problems: What is wrong, a sentence each.
    """

    autopar: str
    python: str
    system: str
    cores: int
    memory: int
    packages: dict[str, str]
    extras: dict[str, str]
    solvers: dict[str, str]
    cache: Cache | None
    problems: tuple[str, ...]


@click.command()
@click.option("--clear-cache", is_flag=True, help="Delete what the cache holds; it is found anew when needed.")
@click.option("--warm", is_flag=True, help="Compile the kernels of a search now, so that no search has to wait for it.")
@cache_options
@json_option
def doctor(clear_cache: bool, warm: bool, cache_dir: Path | None, no_cache: bool, as_json: bool) -> int:
    """Check this installation.

    Prints versions, the solvers found, each tried on a small problem, and where the cache is and how large. The exit
    code is 2 if something it needs is missing.
    """
    folder = resolve_cache_dir(cache_dir, no_cache=no_cache)
    if clear_cache and folder is not None:
        _clear(folder)
    if warm:
        _compile_kernels()
    found = check_up(folder)
    if as_json:
        echo_json(found)
    else:
        click.echo("\n".join(_format(found)))
    return 2 if found.problems else 0


def _compile_kernels() -> None:
    from autopar.warming import Warming

    with show_progress() as progress, Warming(usable_cores()) as warming:
        warming.finish(progress)


def check_up(cache: Path | None) -> Checkup:
    """Return what this installation consists of.

    Args:
        cache: Folder of the cache; None for none.
    """
    packages, extras = ({name: _version(name) for name in names} for names in (_PACKAGES, _EXTRAS))
    solvers = dict(_tried())
    problems = [f"package {name} is missing: pip install {name}" for name, version in packages.items() if not version]
    problems += [f"solver {name}: {state}" for name, state in solvers.items() if state != "works"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    held = None
    if cache is not None:
        sizes = [path.stat().st_size for pattern in _KEPT for path in cache.glob(pattern)]
        held = Cache(str(cache), len(sizes), sum(sizes))
    version = platform.python_version()
    return Checkup(
        __version__, version, system, usable_cores(), memory, packages, extras, solvers, held, tuple(problems)
    )


def _version(package: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    if util.find_spec(package) is None:
        return ""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown version"


def _tried() -> Iterator[tuple[str, str]]:
    """Yield every solver, and whether it finds the optimum of a small problem."""
    from autopar import solvers

    for name in solvers.names():
        if name not in solvers.available():
            yield name, f"needs the package {solvers.NEEDS[name]}"
        else:
            yield name, _trial(solvers.load(name))


def _trial(solver: "Solver") -> str:
    from autopar.errors import AutoparError
    from autopar.problem import Problem

    problem = Problem.build([[1, 2], [3, 0]], [(0, 1, [[0, 9], [9, 0]])])
    try:
        solution = solver.solve(problem, time_limit=30.0)
    except AutoparError as error:
        return str(error.args[0])
    return "works" if solution.cost == 2 else f"returned a cost of {solution.cost:g}, the least is 2"


def _clear(folder: Path) -> None:
    """Delete what this program keeps in a folder, and nothing else that lies there."""
    for pattern in _KEPT:
        for path in folder.glob(pattern):
            path.unlink()


def _format(found: Checkup) -> Iterator[str]:
    from autopar.report.text import format_entries, format_table, heading

    memory = f", {format_bytes(found.memory)} of memory" if found.memory else ""
    yield from format_entries(
        [
            ("autopar", found.autopar),
            ("python", found.python),
            ("system", found.system),
            ("machine", f"{found.cores} cores{memory}"),
        ]
    )
    yield from heading("Packages")
    rows = [(name, version or "missing", "") for name, version in found.packages.items()]
    rows += [(name, version or "not installed", _EXTRAS[name]) for name, version in found.extras.items()]
    yield from format_table(("package", "version", "for"), rows)
    yield from heading("Solvers")
    yield from format_table(("solver", "state"), list(found.solvers.items()))
    yield from heading("Cache")
    if found.cache is None:
        yield "switched off"
    else:
        yield f"{found.cache.folder}: {found.cache.files} files, {format_bytes(found.cache.bytes)}"
    yield ""
    yield from found.problems or ["everything it needs is there"]
