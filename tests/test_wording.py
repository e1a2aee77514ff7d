"""Sentences a user meets: those that people did not understand are gone, and what replaced them is said."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cli.commands import COMMANDS, SECTIONS, app
from autopar.configuration import Configuration, hosted_words, left_words
from autopar.recompute import Hosted
from autopar.report.summary import why_stopped
from autopar.report.text import format_slower
from autopar.sharding import Mesh
from autopar.sizing.goals import Goal
from tests.plans import two_stage_plan

ROOT = Path(__file__).parents[1]
NOT_UNDERSTOOD = (
    "differs from these in more than details",
    "the terms of a value have one reduction",
    "equal blocks are sharded alike",
    "no norm of all gradients first",
    "the gap left is the bound's weakness",
    "a pin opens it",
    "put aside: ",
    "plans by degrees, nearest to this one first",
    "on the way: first plan",
    "Seconds until the plan is there",
    "what is proven is so for any",
    "which splits data elsewhere",
    "of its tensors drawn",
    "a goal that is easier to meet",
    "the legend hides and shows",
)
"""Parts of sentences that were found hard to understand when the tool was tried as a new user would."""


@pytest.mark.parametrize("words", NOT_UNDERSTOOD)
def test_what_was_not_understood_is_gone(words: str) -> None:
    texts = [path for kind in ("*.py", "*.j2", "*.js") for path in (ROOT / "autopar").rglob(kind)]
    texts += [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]

    assert [str(path) for path in texts if words in path.read_text()] == []


def _unproven() -> str:
    search = two_stage_plan().search
    assert search is not None
    unproven = replace(search, termination="exhausted", bound=0.982 * search.objective, history=())
    return why_stopped(unproven)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (lambda: left_words(1)[0], "1 configuration was skipped as unpromising; the bound holds"),
        (
            lambda: hosted_words((), (Hosted.ACTIVATIONS, Hosted.OPTIMIZER), 1.0)[0],
            "CPU offload of activations and optimizer state was not tried because plans fit without it; pin `offload`",
        ),
        (lambda: Goal(budget=1.0, gpu_hour_price=2.0).raised_to(0.07119), "raise --budget to at least 0.0712"),
        (lambda: format_slower(14.83, 1.0), "15 times as slow"),
        (lambda: Configuration(1, Mesh.of(inner=8), 1, "1f1b").words, "8 GPUs, 1 microbatch"),
        (_unproven, "search complete; the remaining 1.8 % is unproven"),
    ],
)
def test_what_is_said_in_its_place(said: Callable[[], str], words: str) -> None:
    assert said().startswith(words)


def test_help_lists_every_command_once_with_a_whole_sentence() -> None:
    """By what they are for, and no sentence is cut at 80 columns."""
    text = CliRunner().invoke(app, ["--help"], terminal_width=80).output

    assert [command.name for command in COMMANDS] == [
        line.split()[0]
        for section in text.split("\n\n")
        if section.partition(":")[0] in SECTIONS
        for line in section.splitlines()[1:]
    ]
    assert len(set(COMMANDS)) == len(COMMANDS)
    assert "..." not in text.partition("Find a plan")[2]
