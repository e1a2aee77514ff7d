"""The package as a whole: what importing it costs and what it offers."""

import subprocess
import sys
from importlib import metadata, resources

import pytest

import autopar

HEAVY = (
    "onnx",
    "networkx",
    "ortools",
    "highspy",
    "pulp",
    "onnxruntime",
    "torch",
    "rich",
    "click",
    "numpy",
    "bokeh",
    "matplotlib",
)


def _modules_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    """`import autopar` is for everybody's scripts; libraries load when used."""
    loaded = _modules_after("import autopar")

    assert loaded.isdisjoint(HEAVY)


def test_help_loads_no_solver() -> None:
    """The command line answers at once."""
    loaded = _modules_after("from autopar.cli import main")

    assert loaded.isdisjoint(set(HEAVY) - {"click"})


@pytest.mark.parametrize("name", autopar.__all__)
def test_every_public_name_exists(name: str) -> None:
    """Although they are loaded when first used."""
    assert getattr(autopar, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    """As in any module."""
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'sovle'"):
        autopar.sovle  # noqa: B018


def test_version_is_that_of_the_distribution() -> None:
    """Written once for people and once for pip."""
    try:
        installed = metadata.version("autopar")
    except metadata.PackageNotFoundError:
        pytest.skip("autopar runs from its folder without having been installed")

    assert autopar.__version__ == installed


def test_package_says_that_it_is_typed() -> None:
    """PEP 561: without the marker type checkers ignore its annotations."""
    assert (resources.files(autopar) / "py.typed").is_file()
