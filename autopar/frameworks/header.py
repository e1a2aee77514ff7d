"""What a file says about itself."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.escaping import one_line
from autopar.plan import Plan

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Remarks:
    """What is to be said of a file beside its content.

    Attributes:
        lost: What of the plan the file does not say, a sentence each.
        granted: What the prediction takes for granted and the file does not ask for.
        names: Of which version of the framework the names in the file are, and how that is known.
        outcome: What the file comes to when it is read and predicted; empty if it was not.
        environment: What has to be set outside the file.
    """

    lost: Sequence[str]
    granted: Sequence[str] = ()
    names: str = ""
    outcome: str = ""
    environment: Sequence[str] = ()


def header(plan: Plan, what: str, remarks: Remarks, mark: str = "# ") -> str:
    """Return the comment that opens a file.

    Args:
        plan: The plan that is written.
        what: What the file is.
        remarks: What is to be said of it.
        mark: What a line of a comment begins with.
    """
    sentences = [
        f"{what}, written by autopar for {plan.model.name} on {plan.job.gpus} devices.",
        f"Plan: {plan.summary}",
        *filter(None, (remarks.outcome, remarks.names)),
        *_listed("Not expressed:", remarks.lost),
        *_listed("Taken for granted by the prediction, not asked for here:", remarks.granted),
        *_listed("To be set outside this file:", remarks.environment),
    ]
    lines = [
        line
        for sentence in map(one_line, sentences)
        for line in textwrap.wrap(sentence, _WIDTH, subsequent_indent="  " if sentence.startswith("- ") else "")
    ]
    return "".join(f"{mark}{line}\n" for line in lines)


def _listed(title: str, sentences: Iterable[str]) -> list[str]:
    items = [f"- {sentence}" for sentence in sentences]
    return [title, *items] if items else []
