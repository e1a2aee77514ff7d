"""The commands that hold predictions against measurements, and fit stacks to them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.completion import complete_cluster, complete_model, complete_stack
from autopar.cli.files import prepare_file, prepare_folder
from autopar.cli.interruption import Interruption
from autopar.cli.invocation import typed_command
from autopar.cli.options import (
    cache_options,
    dims_option,
    echo_json,
    folder_option,
    json_option,
    profile_option,
    resolve_cache_dir,
)
from autopar.cli.values import file_path, positive_whole, precision_name
from autopar.display import show_progress
from autopar.escaping import one_line

if TYPE_CHECKING:
    from autopar.cost import Stack
    from autopar.validation.calibrate import Calibration


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.split(",") if name.strip()) if value else ()


@click.command()
@click.argument("folders", metavar="DATA_DIR...", type=file_path(), nargs=-1, required=True)
@click.option("--source", "sources", multiple=True, metavar="NAME", help="Only rows of this source; can be repeated.")
@click.option(
    "--stack", "files", multiple=True, type=file_path(), metavar="FILE", help="Use this stack in place of its namesake."
)
@click.option(
    "--workers", type=positive_whole(), default=1, show_default=True, metavar="N", help="Processes that predict."
)
@folder_option("Write the tables there, as .md and .json.")
@cache_options
@json_option
@click.pass_context
def validate(
    context: click.Context,
    folders: tuple[Path, ...],
    sources: tuple[str, ...],
    files: tuple[Path, ...],
    workers: int,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Compare predictions with published measurements.

    A DATA_DIR holds a train.json; several are taken together. Every row is built from the zoo and predicted by its
    degrees, like `autopar predict`; rows that cannot be expressed are listed with the reason. Timings of kernels and
    collectives beside it are compared with the cost model, unless --source is given. Ctrl-C reports what is done.
    """
    command = typed_command(context)
    if output is not None:
        prepare_folder(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    from autopar.cost import load_stack
    from autopar.errors import DataError
    from autopar.validation.micro import micro_errors
    from autopar.validation.records import load_rows
    from autopar.validation.report import format_validation, to_dicts, write_pages
    from autopar.validation.run import predict_rows

    rows = [row for folder in folders for row in load_rows(folder)]
    known = sorted({row.source for row in rows})
    for source in sources:
        if source not in known:
            raise DataError(f"no row is of source {source!r}", hint=f"there are {', '.join(known)}")
    chosen = [row for row in rows if not sources or row.source in sources]
    stacks = [load_stack(file) for file in files]
    with Interruption() as interruption, show_progress() as progress:
        outcomes = list(
            predict_rows(
                chosen,
                cache_dir=cache,
                stacks=stacks,
                workers=workers,
                progress=progress,
                should_stop=interruption.requested,
            )
        )
        stopped = interruption.requested()
    micro = () if sources or stopped else [error for folder in folders for error in micro_errors(folder)]
    if output is not None:
        from autopar.bench.conditions import conditions

        for path in write_pages(outcomes, conditions(command), output, micro):
            click.echo(one_line(f"wrote {path}"), err=True)
    if as_json:
        echo_json(to_dicts(outcomes))
    else:
        click.echo(format_validation(outcomes, micro), nl=False)
    return ExitCode.INTERRUPTED if stopped else ExitCode.DONE


@click.command()
@click.argument("data", metavar="[DATA_DIR|STEPS.csv|LOG...]", nargs=-1, type=file_path())
@click.option(
    "--stack",
    metavar="NAME|FILE",
    shell_complete=complete_stack,
    help="With DATA_DIR the stack to fit, such as megatron-a100; with steps the one to start from: its kernels, and "
    "scalars that are not fitted.",
)
@profile_option
@click.option("--name", metavar="NAME", help="Name of the stack, and of the cluster; default: that of the file.")
@click.option(
    "--model", shell_complete=complete_model, help="Model of the steps, unless a column names it, or a log its sizes."
)
@click.option(
    "--degrees", default="", metavar="'dp=2 tp=2 microbatch=4'", help="The plan of logs that do not state it."
)
@click.option(
    "--cluster",
    metavar="NAME|FILE",
    shell_complete=complete_cluster,
    help="With steps what they ran on, default h100; with --profile alone a cluster whose memory, size of nodes and "
    "price are taken over.",
)
@click.option(
    "--precision",
    type=precision_name,
    metavar="NAME",
    help="What the steps were computed in; default: what a log says, else mixed.",
)
@click.option("--optimizer", default="adam", show_default=True, metavar="NAME", help="Optimizer of the steps.")
@dims_option("Size of a dynamic dim of the model, or of a zoo model's configuration")
@click.option(
    "--scalars",
    callback=_names,
    metavar="NAME,...",
    help="Scalars to fit; default: all that make a difference to the measurements.",
)
@click.option(
    "--memory",
    is_flag=True,
    help="With DATA_DIR, fit what the stack takes besides its tensors to measured memory, and leave its scalars.",
)
@click.option("-o", "--output", type=file_path(), metavar="FILE", help="Write the stack there, as YAML.")
@click.option(
    "--cluster-output", type=file_path(), metavar="FILE", help="With --profile alone, write the cluster there, as YAML."
)
@cache_options
@json_option
def calibrate(
    data: tuple[Path, ...],
    stack: str | None,
    profile: Path | None,
    name: str | None,
    output: Path | None,
    cluster_output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    *,
    memory: bool,
    **request: Any,
) -> int:
    """Fit a software stack to measurements.

    These are published ones, step times of your own, or a profile. Rows of DATA_DIR that ran on a stack are split by
    the hash of their configuration: the scalars of the stack are fitted to one part, and errors are reported on both.
    STEPS.csv has a step a row: degrees, and seconds or a log; a LOG is what Megatron-LM, torchtitan or DeepSpeed print
    (docs/profile.md). With --profile, measured events count in place of formulas. --profile alone fits a cluster and a
    stack to the events, which --cluster FILE --stack FILE take at once.
    """
    for file in (output, cluster_output):
        if file is not None:
            prepare_file(file)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    if not data:
        if profile is None:
            raise click.UsageError("give DATA_DIR, STEPS.csv, a log or --profile DIR")
        return _machine(profile, name, request["cluster"], output, cluster_output, as_json=as_json)
    if cluster_output is not None:
        raise click.UsageError("--cluster-output goes with --profile alone: steps say nothing of single devices")
    from autopar.validation.report import format_calibration

    if memory:
        return _memory(data, stack, output, cache, as_json=as_json)
    if not any(path.is_dir() for path in data):
        found = _steps(data, stack, profile, name or data[0].stem, cache, request)
    else:
        if len(data) > 1:
            raise click.UsageError("give one DATA_DIR alone, or files")
        if stack is None:
            raise click.UsageError("DATA_DIR takes --stack NAME, the stack to fit, such as megatron-a100")
        from autopar.validation.calibrate import calibrate as fit
        from autopar.validation.records import load_rows

        with show_progress() as progress:
            found = fit(load_rows(data[0]), stack, scalars=request["scalars"], cache_dir=cache, progress=progress)
    _write_stack(found.stack, output)
    if as_json:
        echo_json(found.stack.to_dict())
    else:
        click.echo(format_calibration(found), nl=False)
    return ExitCode.DONE


def _memory(
    data: tuple[Path, ...], stack: str | None, output: Path | None, cache: Path | None, *, as_json: bool
) -> int:
    """Fit the reserve of a stack to the measured memory of rows."""
    if stack is None or not all(path.is_dir() for path in data):
        raise click.UsageError("--memory takes DATA_DIR and --stack NAME, the stack whose reserve is fitted")
    from autopar.validation.records import load_rows
    from autopar.validation.report import format_reserve
    from autopar.validation.reserve_fit import fit_reserve

    with show_progress() as progress:
        found = fit_reserve([row for folder in data for row in load_rows(folder)], stack, cache, progress)
    _write_stack(found.stack, output)
    if as_json:
        echo_json(found.stack.to_dict())
    else:
        click.echo(format_reserve(found), nl=False)
    return ExitCode.DONE


def _write_stack(stack: "Stack", output: Path | None) -> None:
    from autopar.cost.stack import format_stack
    from autopar.writing import write_atomically

    if output is not None:
        write_atomically(output, format_stack(stack).encode())
        click.echo(one_line(f"wrote {output}"), err=True)


def _steps(
    data: tuple[Path, ...],
    stack: str | None,
    profile: Path | None,
    name: str,
    cache: Path | None,
    request: dict[str, Any],
) -> "Calibration":
    """Return the stack fitted to step times of one's own."""
    from dataclasses import replace

    from autopar.cluster import load_cluster
    from autopar.cost import NEAREST, resolve_stack
    from autopar.cost.stack import SCALARS
    from autopar.errors import DataError
    from autopar.events import Profile
    from autopar.validation.own_steps import calibrate_steps

    unknown = [scalar for scalar in request["scalars"] if scalar not in SCALARS]
    if unknown:
        raise DataError(f"there is no scalar {unknown[0]!r}", hint=f"choose {', '.join(SCALARS)}")
    cluster = load_cluster(request["cluster"] or "h100")
    start = replace(resolve_stack(stack or NEAREST, cluster), name=name, fit=None, clusters=())
    with show_progress() as progress:
        return calibrate_steps(
            data,
            request["model"],
            start,
            cluster,
            degrees=request["degrees"],
            dims=request["dims"],
            precision=request["precision"],
            optimizer=request["optimizer"],
            profile=Profile.of(profile),
            scalars=request["scalars"],
            cache_dir=cache,
            progress=progress,
        )


def _machine(
    folder: Path, name: str | None, base: str | None, output: Path | None, cluster_output: Path | None, *, as_json: bool
) -> int:
    """Fit a cluster and a stack to a profile."""
    from autopar.cluster import format_cluster, load_cluster
    from autopar.events import Profile
    from autopar.validation.own_machine import fit_machine
    from autopar.validation.report import format_machine
    from autopar.writing import write_atomically

    profile = Profile.of(folder)
    assert profile is not None, "it was given"
    found = fit_machine(profile, name or profile.name, base=None if base is None else load_cluster(base))
    _write_stack(found.stack, output)
    if cluster_output is not None:
        write_atomically(cluster_output, format_cluster(found.cluster).encode())
        click.echo(one_line(f"wrote {cluster_output}"), err=True)
    if as_json:
        echo_json({"cluster": found.cluster.to_dict(), "stack": found.stack.to_dict()})
    else:
        click.echo(format_machine(found), nl=False)
    return ExitCode.DONE
