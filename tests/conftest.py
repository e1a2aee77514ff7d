"""Settings all tests share."""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from autopar.discover import discovery
from autopar.discover.rules import Rule
from autopar.discover.store import Store

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in jobs in the background of a script; what tests start would too
    signal.signal(signal.SIGINT, signal.default_int_handler)

HELPERS_OF_EXTRAS = {"jax": ["jax_models.py"], "torch": ["memory_cases.py", "tracked.py"]}
"""Helpers that import an extra at their top, by the extra: their examples are collected only where it is installed."""

collect_ignore = [file for extra, files in HELPERS_OF_EXTRAS.items() if not find_spec(extra) for file in files]

FIND_RULES = ("test_discover", "test_law_rules", "test_tactics_shardy")
"""How the files begin whose tests are about finding rules: each of them finds its own."""


LONG = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())
"""Tests and cases of tests that take seconds; see `tests/durations.py`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long tests as slow, before slow tests are deselected."""
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for rules that all tests share, those of other processes of this run too."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "rules"
    folder.mkdir(exist_ok=True)
    return folder


class RememberingStore(Store):
    """Rules kept in memory, those of earlier tests among them."""

    _known: tuple[dict[str, Rule], dict[str, str]] = ({}, {})

    def __init__(self, folder: str | Path | None) -> None:
        super().__init__(folder)
        if folder is None:
            self._rules, self._signatures = self._known


@pytest.fixture(scope="module", autouse=True)
def _rules_are_found_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where nothing is kept on disk, let a test know the rules that earlier ones found: the same op, the same rule."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.path.name.startswith(FIND_RULES):
            patch.setattr(discovery, "Store", RememberingStore)
        yield
