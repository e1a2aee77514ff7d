"""The commands that take plans to frameworks, and configurations of frameworks to plans."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.answers import give_plan
from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_file
from autopar.cli.interruption import Interruption
from autopar.cli.options import (
    cache_options,
    cluster_option,
    echo_json,
    json_option,
    memory_limit_option,
    moved_model_option,
    plan_argument,
    precision_option,
    resolve_cache_dir,
    stack_option,
    time_limit_option,
)
from autopar.cli.values import file_path, positive_whole
from autopar.display import show_progress
from autopar.escaping import one_line

if TYPE_CHECKING:
    from autopar.prediction import Prediction


@click.command()
@plan_argument
@click.option("--to", "target", required=True, metavar="NAME", help="Framework; a wrong name lists them.")
@click.option(
    "-o", "--output", type=file_path(), metavar="FILE|DIR", help="Where to write; text goes to standard output without."
)
@moved_model_option
@cache_options
def export(
    plan_file: Path, target: str, output: Path | None, model: str | None, cache_dir: Path | None, no_cache: bool
) -> int:
    """Write a plan as the configuration of a framework.

    PLAN is a plan.json or its folder.
    Frameworks are megatron, torchtitan, deepspeed, nemo, accelerate, trainer, fsdp and maxtext, which
    take degrees; jax, pytorch and onnx, which take placements of tensors. What a framework cannot be told is listed in
    the file and on standard error. A configuration by degrees is predicted without what the framework cannot do; one
    that does not fit into memory is not written.
    """
    from autopar.plan import Plan
    from autopar.writing import write_atomically

    if target == "onnx" and output is None:
        raise click.UsageError("an ONNX file is no text: give -o FILE.onnx or -o DIR")
    if output is not None and not output.is_dir():
        prepare_file(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    plan = Plan.load(plan_file)
    from autopar import frameworks

    exported = frameworks.export(plan, target, model=model, cache_dir=cache)
    if output is None:
        click.echo(exported.text, nl=False)
    else:
        path = output / exported.name if output.is_dir() else output
        write_atomically(path, exported.data)
        click.echo(one_line(f"wrote {path}"), err=True)
    if exported.outcome:
        click.echo(one_line(exported.outcome), err=True)
    for sentence in exported.lost:
        click.echo(f"not expressed: {one_line(sentence)}", err=True)
    for sentence in exported.granted:
        click.echo(f"taken for granted: {one_line(sentence)}", err=True)
    return ExitCode.DONE


@click.command(name="import")
@click.argument("config_file", metavar="FILE", type=file_path())
@click.option("--from", "framework", required=True, metavar="NAME", help="Framework; a wrong name lists them.")
@click.option("--gpus", type=positive_whole(), metavar="N", help="Number of devices, if the file does not say.")
@click.option("--model", help="The model, if the file does not state its sizes, or to use another one.")
@cluster_option
@stack_option
@precision_option
@memory_limit_option
@click.option("-o", "--output", type=file_path(), metavar="PLAN", help="Write the plan there, as JSON.")
@click.option("--best", "solves", is_flag=True, help="Also search the best plan for the same job, and compare.")
@time_limit_option("Seconds for that search.", 60.0)
@cache_options
@json_option
@click.option("-v", "--verbose", is_flag=True, help="Print time and memory of every stage, too.")
@click.pass_context
def import_config(
    context: click.Context,
    /,
    config_file: Path,
    framework: str,
    gpus: int | None,
    model: str | None,
    precision: str,
    output: Path | None,
    solves: bool,
    time_limit: float,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    verbose: bool,
    **request: Any,
) -> int:
    """Predict time and memory of the configuration of a framework.

    FILE holds the arguments of a training script of Megatron-LM, a torchtitan configuration or a DeepSpeed one. Prints
    what was understood, what was ignored and what is assumed otherwise, then what `predict` prints. With --best the
    best plan for the same job follows, and what the configuration takes beside it; -o then writes the best plan, and
    --json prints both, as "current" and "best".
    """
    from autopar import prediction
    from autopar.cluster import Cluster, load_cluster
    from autopar.cost import resolve_stack
    from autopar.frameworks.configurations import read_configuration
    from autopar.report.prediction import format_prediction
    from autopar.report.text import WIDTH, wrap

    if output is not None:
        prepare_file(output)
    found = read_configuration(config_file, framework, gpus=gpus, model=model)
    for what, sentences in (("understood", found.understood), ("ignored", found.ignored)):
        told = f"{what}: {'; '.join(map(one_line, sentences))}" if sentences else ""
        for line in wrap(told, WIDTH, rest="  "):
            click.echo(line, err=True)
    for sentence in found.assumed:
        click.echo(f"assumed: {one_line(sentence)}", err=True)
    if found.software:
        named = request["cluster"]
        machine = named if isinstance(named, Cluster) else load_cluster(named)
        request |= {"cluster": machine, "stack": found.stack(resolve_stack(request["stack"], machine))}
    given = context.get_parameter_source("precision") is click.core.ParameterSource.COMMANDLINE
    request |= {
        "dims": found.dims,
        "precision": precision if given or found.precision is None else found.precision,
        "cache_dir": resolve_cache_dir(cache_dir, no_cache=no_cache),
    }
    predicted = prediction.predict(found.model, found.degrees, first_layers=found.first_layers, **request)
    text = format_prediction(predicted.plan, predicted.timeline, tables=verbose)
    if not solves:
        give_plan(predicted.plan, text, output, as_json=as_json)
        return ExitCode.DONE
    if not as_json:
        click.echo(text)
    return _solve_beside(predicted, found.model, {**request, "time_limit": time_limit}, output, as_json=as_json)


def _solve_beside(
    current: "Prediction", model: str, request: dict[str, Any], output: Path | None, *, as_json: bool
) -> int:
    """Search the best plan for the job of a configuration, and tell what the configuration takes beside it."""
    from autopar import api
    from autopar.report import format_answer
    from autopar.report.parts import why_lost
    from autopar.report.text import format_entries
    from autopar.search.backends import usual_workers

    job = current.plan.job
    with Interruption() as interruption:
        with show_progress() as shown:
            best = api.solve(
                model,
                gpus=job.gpus,
                global_batch=job.global_batch,
                workers=usual_workers(),
                progress=interruption.watch(shown),
                should_stop=interruption.requested,
                **request,
            )
        stopped = interruption.requested()
    fits = "" if current.fits else "does not fit; "
    entries = [("yours", f"{fits}{why_lost(best, current.plan)}")]
    if output is not None:
        best.save(output)
        click.echo(one_line(f"wrote {output}"), err=True)
    if as_json:
        echo_json({name: json.loads(plan.to_json()) for name, plan in (("current", current.plan), ("best", best))})
    else:
        click.echo("\n".join((format_answer(best).rstrip(), *format_entries(entries))))
    return ExitCode.INTERRUPTED if stopped else ExitCode.DONE
