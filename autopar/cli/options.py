"""Types of arguments and groups of options that several commands share. All of it is checked before any work starts."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autopar.cli.completion import complete_cluster, complete_stack
from autopar.cli.files import prepare_folder

CACHE_VARIABLE = "AUTOPAR_CACHE_DIR"

Command = Callable[..., Any]
"""A function about to become a command."""


def positive_number(text: str) -> float:
    """Return a finite number above 0.

    Raises:
        click.BadParameter: If the text is none.
    """
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number") from None
    if not (math.isfinite(number) and number > 0):
        raise click.BadParameter(f"{text} is not a finite number above 0")
    return number


def dim_binding(text: str) -> tuple[str, int]:
    """Return name and size of a dim written as `DIM=VALUE`.

    Raises:
        click.BadParameter: If it is written otherwise, or the size is not positive.
    """
    name, separator, size = (part.strip() for part in text.partition("="))
    if not (separator and name):
        raise click.BadParameter(f"{text!r} is not of the form DIM=VALUE, e.g. batch=8")
    if not (size.isdecimal() and int(size) > 0):
        raise click.BadParameter(f"the size of dim {name!r} is {size!r}, not a whole number above 0")
    return name, int(size)


def solver_name(name: str) -> str:
    """Return the name of a solver that is installed.

    Raises:
        click.BadParameter: If there is none of that name; the message lists those there are.
    """
    from autopar import solvers

    available = solvers.available()
    if name not in available:
        why = "not installed" if name in solvers.names() else "unknown"
        raise click.BadParameter(f"solver {name!r} is {why}; there are {', '.join(available)}")
    return name


def solver_names(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of solvers written with commas between them.

    Raises:
        click.BadParameter: If one is not installed.
    """
    if isinstance(text, tuple):  # click converts a default, too
        return text
    return tuple(solver_name(name.strip()) for name in text.split(",") if name.strip())


def comma_separated(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return names written with commas between them; "none" for none."""
    if isinstance(text, tuple):  # click converts a default, too
        return text
    return tuple(name.strip() for name in text.split(",") if name.strip() not in ("", "none"))


def _as_mapping(ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, int], ...]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for name, size in value:
        if dims.setdefault(name, size) != size:
            raise click.BadParameter(f"dim {name!r} is set to {dims[name]} and to {size}", ctx, param)
    return dims


def _in_bytes(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    return None if value is None else value * 1e9


def file_path() -> click.Path:
    """Return the type of a file's path; whether it can be read or written is found out where that is done."""
    return click.Path(path_type=Path)


def model_options(function: Command) -> Command:
    """Add the options that say how a model is read."""
    for option in (
        click.option(
            "--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True, help="What a step is."
        ),
        click.option(
            "--set",
            "dims",
            type=dim_binding,
            multiple=True,
            callback=_as_mapping,
            metavar="DIM=VALUE",
            help="Size of a dynamic dim of the model; can be repeated.",
        ),
    ):
        function = option(function)
    return function


def stack_option(function: Command) -> Command:
    """Add the option for the software stack."""
    return click.option(
        "--stack",
        default="default",
        show_default=True,
        metavar="NAME|FILE",
        shell_complete=complete_stack,
        help="Software that runs the plan: one of `autopar stacks`, or a YAML file.",
    )(function)


def positive_whole() -> click.IntRange:
    """Return the type of a whole number from 1 on."""
    return click.IntRange(min=1)


def memory_limit_option(function: Command) -> Command:
    """Add the option for the memory a plan may use."""
    return click.option(
        "--memory-limit",
        type=positive_number,
        callback=_in_bytes,
        metavar="GB",
        help="Memory a plan may use per device, in 1e9 bytes; default: what the device has, less a reserve.",
    )(function)


def precision_option(function: Command) -> Command:
    """Add the option for what is stored in which precision."""
    return click.option(
        "--precision",
        type=click.Choice(["mixed", "megatron-fp16", "fsdp", "fp32"]),
        default="mixed",
        show_default=True,
        help="What is stored in which precision; `docs/cost_model.md` has the bytes.",
    )(function)


def job_options(*, gpus_required: bool = True) -> Callable[[Command], Command]:
    """Return what adds the options that say what is to be planned, and how hard to look for it."""
    gpus = click.option(
        "--gpus", type=click.IntRange(min=1), required=gpus_required, metavar="N", help="Number of devices."
    )
    return lambda function: gpus(_other_job_options(function))


def _other_job_options(function: Command) -> Command:
    for option in reversed(
        (
            click.option(
                "--cluster",
                default="h100",
                show_default=True,
                metavar="NAME|FILE",
                shell_complete=complete_cluster,
                help="Preset or YAML file.",
            ),
            stack_option,
            precision_option,
            click.option(
                "--global-batch",
                type=click.IntRange(min=1),
                metavar="B",
                help="Samples per step; default: the model's own.",
            ),
            memory_limit_option,
            click.option(
                "--loss", default="auto", show_default=True, metavar="NAME", help="Loss of the training step."
            ),
            click.option("--optimizer", default="adam", show_default=True, metavar="NAME", help="Optimizer."),
            click.option(
                "--solver",
                type=solver_name,
                default="auto",
                show_default=True,
                metavar="NAME",
                help="Solver of the placements.",
            ),
            click.option(
                "--time-limit", type=positive_number, metavar="S", help="Seconds after which the best plan is taken."
            ),
        )
    ):
        function = option(function)
    return function


def cache_options(function: Command) -> Command:
    """Add the options that say where results of discovery are kept; the command receives `cache_dir`."""
    function = click.option(
        "--cache-dir",
        type=click.Path(path_type=Path, file_okay=False),
        envvar=CACHE_VARIABLE,
        show_envvar=True,
        help="Where discovered rules and plans found are kept; default: the user's cache folder.",
    )(function)
    return click.option("--no-cache", is_flag=True, help="Neither read nor write the cache.")(function)


def engine_options(function: Command) -> Command:
    """Add the options that say who searches; the command receives `workers`, `engine` and `ray_address`."""
    for option in reversed(
        (
            click.option(
                "--workers",
                type=positive_whole(),
                metavar="N",
                help="Processes that search; default: this one, with Ray as many as the cluster has CPUs.",
            ),
            click.option(
                "--engine",
                type=click.Choice(["local", "ray"]),
                default="local",
                show_default=True,
                help="Where they run: here, or on a Ray cluster.",
            ),
            click.option(
                "--ray-address", metavar="ADDRESS", help="A running Ray cluster; default: one started on this machine."
            ),
        )
    ):
        function = option(function)
    return function


def json_option(function: Command) -> Command:
    """Add the option for machine-readable output."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else on standard output.")(
        function
    )


def resolve_cache_dir(cache_dir: Path | None, *, no_cache: bool) -> Path | None:
    """Return the folder of the cache, None for no cache.

    Raises:
        JobError: If the folder cannot be made or written to.
    """
    if no_cache:
        return None
    import platformdirs

    folder = cache_dir or platformdirs.user_cache_path("autopar")
    return prepare_folder(folder, hint="choose another one with --cache-dir, or use --no-cache")


def echo_json(value: Any) -> None:
    """Print a value as JSON."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=1))
