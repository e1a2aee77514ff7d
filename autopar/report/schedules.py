"""Schedules as text: what each leaves idle and holds, and one of them drawn task by task."""

from autopar.errors import ProgramError
from autopar.formulate.scheduled_step import StageWork, scheduled_step
from autopar.report.text import format_share, format_table
from autopar.schedule import SCHEDULES, Pass, Schedule
from autopar.schedule.timing import tasks_of
from autopar.simulate.pipeline import Runs, run_pipeline

Seconds = tuple[float, float, float]
"""Of a forward, a backward for inputs and one for weights of a whole group; its stages share them evenly."""

_CELL = 2  # columns of a chart per second: a pass that takes 1 s shows its letter and one digit


def _usual_chunks(schedule: Schedule, num_groups: int, num_microbatches: int) -> int | None:
    """Return the fewest stages per group that show what a schedule is for; None if the numbers do not fit it."""
    for num_chunks in (2, 1):
        if not schedule.problem(num_groups, num_microbatches, num_chunks)[0]:
            return num_chunks
    return None


def _passes(schedule: Schedule, seconds: Seconds, num_chunks: int) -> Seconds:
    """Return the seconds of the passes of one stage."""
    forward, backward, weight = (each / num_chunks for each in seconds)
    if schedule.splits:
        return forward, backward, weight
    return forward, backward + weight if schedule.trains else 0.0, 0.0


def format_schedules(num_groups: int, num_microbatches: int, seconds: Seconds = (1.0, 1.0, 1.0)) -> str:
    """Return a table of all schedules, with two stages per group where the schedule allows for several.

    The bubble is the part of a step that is idle if all stages are equal and nothing is sent. What is held counts in
    microbatches of a whole group: a chunk of two is half of one.

    Args:
        num_groups: Groups of devices.
        num_microbatches: Microbatches.
        seconds: Of the passes of a group; those of its stages add up to them.
    """
    rows = []
    for name, schedule in SCHEDULES.items():
        num_chunks = _usual_chunks(schedule, num_groups, num_microbatches)
        if num_chunks is None:
            rows.append((name, *["-"] * 4))
            continue
        passes = _passes(schedule, seconds, num_chunks)
        step = scheduled_step(name, num_groups, num_microbatches, [StageWork(*passes)] * num_groups * num_chunks)
        work = num_microbatches * num_chunks * sum(passes)
        held = [schedule.in_flight(group, num_groups, num_microbatches, num_chunks) for group in range(num_groups)]
        names = " ".join(schedule.passes)
        rows.append((name, names, str(num_chunks), format_share(step - work, step), f"{max(held) / num_chunks:g}"))
    return "\n".join(format_table(("schedule", "passes", "stages per group", "bubble", "held at most"), rows)) + "\n"


def format_chart(
    name: str, num_groups: int, num_microbatches: int, num_chunks: int = 1, seconds: Seconds = (1.0, 1.0, 1.0)
) -> str:
    """Return a schedule as a chart: a row per group of devices, so many columns per second.

    `f0` is the forward of microbatch 0, `b0` its backward, `w0` its weight pass; capital letters are those of every
    second chunk of a group. Nothing is sent.

    Args:
        name: A key of `SCHEDULES`.
        num_groups: Groups of devices.
        num_microbatches: Microbatches.
        num_chunks: Stages per group.
        seconds: Of the passes of a stage, whole numbers.

    Raises:
        ProgramError: If there is no such schedule, or the numbers do not fit it.

    >>> print(format_chart("zb-h1", 2, 3), end="")
    f0f1  b0w0f2b1w1b2w2
      f0b0f1b1w0f2b2w1w2
    """
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise ProgramError(f"there is no schedule {name!r}", hint=f"known are {', '.join(SCHEDULES)}")
    problem, hint = schedule.problem(num_groups, num_microbatches, num_chunks)
    if problem:
        raise ProgramError(f"schedule {name!r} {problem}", hint=hint)
    forward, backward, weight = _passes(schedule, seconds, 1)
    stages = num_groups * num_chunks
    took = {Pass.FORWARD: forward, Pass.BACKWARD: backward, Pass.WEIGHT: weight}
    nothing = [0.0] * (stages - 1)
    runs, _ = run_pipeline(
        tasks_of(schedule, num_groups, num_microbatches, num_chunks),
        schedule.groups(num_groups, num_chunks),
        [took] * stages,
        nothing,
        nothing,
    )
    return "".join(f"{_row(done)}\n" for done in runs)


def _row(runs: Runs) -> str:
    cell = _CELL * max(1, *(len(str(run.task.microbatch)) for run in runs))
    text = ""
    for run in runs:
        letter = run.task.kind.value if run.task.chunk % 2 else run.task.kind.value.lower()
        label = f"{letter}{run.task.microbatch}"
        text = text.ljust(round(run.start) * cell) + label.ljust(round(run.end - run.start) * cell)
    return text.rstrip()
