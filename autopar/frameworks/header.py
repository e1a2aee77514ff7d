"""What a file says about itself."""

import textwrap
from collections.abc import Iterable

from autopar.plan import Plan

_WIDTH = 110


def header(plan: Plan, framework: str, lost: Iterable[str], mark: str = "# ") -> str:
    """Return the comment that opens a file: which plan it is, and what of it is missing."""
    job = plan.job
    sentences = [
        f"{framework}, written by autopar for {plan.model.name} on {job.gpus} devices.",
        f"Plan: {plan.summary}",
    ]
    missing = list(lost)
    if missing:
        sentences += ["Not expressed:", *(f"- {sentence}" for sentence in missing)]
    else:
        sentences.append("Degrees, stages, schedule, recompute and batch of the plan are all expressed.")
    lines = [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, _WIDTH, subsequent_indent="  " if sentence.startswith("- ") else "")
    ]
    return "".join(f"{mark}{line}\n" for line in lines)
