"""The commands that hold predictions against measurements, and fit stacks to them."""

from pathlib import Path

import click

from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_file, prepare_folder
from autopar.cli.interruption import Interruption
from autopar.cli.invocation import typed_command
from autopar.cli.options import cache_options, echo_json, folder_option, json_option, resolve_cache_dir
from autopar.cli.values import file_path, positive_whole
from autopar.display import show_progress
from autopar.escaping import one_line


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
    """Hold predictions against published measurements.

    A DATA_DIR holds a train.json; several are taken together. Every row is built from the zoo and predicted by its
    degrees, like `autopar predict`; rows that cannot be expressed are listed with the reason. Timings of kernels and
    collectives beside it are held against the cost model, unless --source is given. Ctrl-C reports what is done.
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
@click.argument("data", metavar="DATA_DIR", type=file_path())
@click.option("--stack", "name", required=True, metavar="NAME", help="Stack to fit, such as megatron-a100.")
@click.option(
    "--scalars",
    callback=_names,
    metavar="NAME,...",
    help="Scalars to fit; default: all that make a difference to the measurements.",
)
@click.option("-o", "--output", type=file_path(), metavar="FILE", help="Write the stack there, as YAML.")
@cache_options
@json_option
def calibrate(
    data: Path,
    name: str,
    scalars: tuple[str, ...],
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Fit a software stack to published measurements.

    Rows of DATA_DIR that ran on the stack are split by the hash of their configuration: the scalars of the stack are
    fitted to one part, and errors are reported on both.
    """
    if output is not None:
        prepare_file(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    from autopar.cost.stack import format_stack
    from autopar.plan import write_atomically
    from autopar.validation.calibrate import calibrate as fit
    from autopar.validation.records import load_rows
    from autopar.validation.report import format_calibration

    with show_progress() as progress:
        found = fit(load_rows(data), name, scalars=scalars, cache_dir=cache, progress=progress)
    if output is not None:
        write_atomically(output, format_stack(found.stack).encode())
        click.echo(one_line(f"wrote {output}"), err=True)
    if as_json:
        echo_json(found.stack.to_dict())
    else:
        click.echo(format_calibration(found), nl=False)
    return ExitCode.DONE
