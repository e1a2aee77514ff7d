"""Whatever a file or an argument holds, a command ends with an answer, one error, or that nothing fits."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import edges, formats, trees
from tests.fuzz.campaign import Finding, campaign, kinds_here, prepare
from tests.fuzz.cases import Case, Seeds, random_of
from tests.fuzz.kinds import KINDS
from tests.fuzz.outcomes import Outcome, judge
from tests.fuzz.sandbox import MAX_BYTES, Run, run

SEED = 20261127
FEW, MANY = 240, 6000
"""Cases of an ordinary run of the tests, and of a slow one."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return prepare((), tmp_path_factory.mktemp("seeds"))


@pytest.fixture
def failures() -> Iterator[list[str]]:
    """Return a list for what failed, which has to be empty in the end."""
    found: list[str] = []
    yield found
    assert not found, "\n".join(found)


def told(found: Finding) -> str:
    """Return what failed, and the command that runs it again."""
    again = f"python -m tests.fuzz --kind {found.kind} --seed {SEED} --case {found.number}"
    return f"{found.outcome}: {found.reason} ({again})"


@pytest.mark.parametrize("cases", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_file_breaks_a_command(cases: int, seeds: Seeds, failures: list[str]) -> None:
    """Cases of all kinds but `hf`, whose runs take seconds each; `python -m tests.fuzz` has them."""
    kinds = [kind for kind in kinds_here(list(KINDS)) if kind != "hf"]

    failures += [told(found) for found in campaign(kinds, SEED, seeds, cases=cases) if found.outcome.failed]


@pytest.mark.slow
def test_no_configuration_of_hugging_face_breaks_a_command(
    tmp_path_factory: pytest.TempPathFactory, failures: list[str]
) -> None:
    """Of architectures that are built here, and of those that PyTorch exports."""
    kinds = kinds_here(["hf"])
    if not kinds:
        pytest.skip("needs torch and transformers")
    own = prepare(kinds, tmp_path_factory.mktemp("seeds"))

    failures += [told(found) for found in campaign(kinds, SEED, own, cases=200) if found.outcome.failed]


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_makes_a_case_again(kind: str, seeds: Seeds) -> None:
    """And another number makes another one."""
    first, again, other = (KINDS[kind].make(random_of(kind, SEED, number), seeds) for number in (7, 7, 8))

    assert first == again
    assert first != other


def test_mutations_leave_the_tree_as_it_is_and_can_be_written() -> None:
    """In every format, with tokens that no writer would write."""
    tree = {"a": [1, 2.5, "x"], "b": {"c": True, "d": None}}

    for number in range(300):
        changed = trees.mutated(random_of("tree", SEED, number), tree)
        for write in (formats.as_json, formats.as_yaml, formats.as_toml, formats.as_arguments):
            assert isinstance(write(changed), bytes)
    assert tree == {"a": [1, 2.5, "x"], "b": {"c": True, "d": None}}
    assert formats.as_json({"a": edges.Raw("nan"), "b": edges.Raw("9" * 5000)}).count(b"9") == 5000


def made(code: int = 0, out: str = "", err: str = "", written: dict[str, bytes] | None = None, **more: int) -> Run:
    return Run(code, out.encode(), err.encode(), written or {}, bool(more.get("hung")), more.get("bytes", 0), 1.0)


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        (made(0, "step time  2 ms\n"), Outcome.ANSWER),
        (made(2, err="error: x\nhint: y\n"), Outcome.ERROR),
        (made(3, err="error: x\n"), Outcome.INFEASIBLE),
        (made(130, err="error: stopped\n"), Outcome.STOPPED),
        (made(99, err="Traceback (most recent call last)\n"), Outcome.TRACEBACK),
        (made(0, "2 ms", "Traceback (most recent call last):\n"), Outcome.TRACEBACK),
        (made(-11), Outcome.CRASH),
        (made(1), Outcome.CRASH),
        (made(0, hung=1), Outcome.HANG),
        (made(0, bytes=MAX_BYTES + 1), Outcome.MEMORY),
        (made(2), Outcome.NONSENSE),
        (made(0, "step time  nan s\n"), Outcome.NONSENSE),
        (made(0, "step time  -2 ms\n"), Outcome.NONSENSE),
        (made(0, '{"step_seconds": -1.0}'), Outcome.NONSENSE),
        (made(0, written={"plan.json": b'{"objective": NaN}'}), Outcome.UNESCAPED),
        (made(2, err="error: a\x1b[31m\n"), Outcome.UNESCAPED),
        (made(2, err=f"error: a\n{edges.MARK} b\n"), Outcome.UNESCAPED),
        (made(0, "\u202e"), Outcome.UNESCAPED),
        (made(0, written={"a.py": f"x = 1\n{edges.MARK}()\n".encode()}), Outcome.UNESCAPED),
        (made(0, written={"a.html": f"<script>{edges.MARK}()</script>".encode()}), Outcome.UNESCAPED),
        (made(0, written={"a.html": f"<p>{edges.MARK}()</p>".encode()}), Outcome.ANSWER),
    ],
)
def test_outcomes_are_told_apart(ended: Run, outcome: Outcome) -> None:
    assert judge(ended)[0] is outcome


def test_runs_are_cut_off(tmp_path: Path) -> None:
    """A run ends with its exit code, and what it wrote is kept."""
    done = run(Case(("clusters", "h100", "--json"), {}), tmp_path / "done")
    wrong = run(Case(("clusters", "h1000"), {}), tmp_path / "wrong")

    assert json.loads(done.out)["name"] == "h100"
    assert (done.code, wrong.code) == (0, 2)
    assert wrong.err.startswith(b"error: there is no cluster 'h1000'")
