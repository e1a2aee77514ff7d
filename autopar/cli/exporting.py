"""The commands that take plans to frameworks, and configurations of frameworks to plans."""

from pathlib import Path
from typing import Any

import click

from autopar.cli.answers import give_plan
from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_file
from autopar.cli.options import (
    cache_options,
    cluster_option,
    json_option,
    memory_limit_option,
    moved_model_option,
    plan_argument,
    precision_option,
    resolve_cache_dir,
    stack_option,
)
from autopar.cli.values import file_path, positive_whole
from autopar.escaping import one_line


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
    """Write a plan in the words of a framework.

    PLAN is a plan.json. Frameworks are megatron, torchtitan, deepspeed and nemo, which take degrees; jax, pytorch and
    onnx, which take placements of tensors. What a framework cannot be told is listed in the file and on standard error.
    A configuration by degrees is read back and predicted; one that does not fit into memory is not written.
    """
    from autopar.plan import Plan, write_atomically

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
@cache_options
@json_option
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
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    **request: Any,
) -> int:
    """Predict what a configuration of a framework comes to.

    FILE holds the arguments of a training script of Megatron-LM, a torchtitan configuration or a DeepSpeed one. Prints
    what was understood, what was ignored and what is assumed otherwise, then what `predict` prints.
    """
    from autopar import prediction
    from autopar.frameworks.configurations import read_configuration
    from autopar.report.prediction import format_prediction

    if output is not None:
        prepare_file(output)
    found = read_configuration(config_file, framework, gpus=gpus, model=model)
    for sentence in found.understood:
        click.echo(f"understood: {one_line(sentence)}", err=True)
    for sentence in found.ignored:
        click.echo(f"ignored: {one_line(sentence)}", err=True)
    for sentence in found.assumed:
        click.echo(f"assumed: {one_line(sentence)}", err=True)
    given = context.get_parameter_source("precision") is click.core.ParameterSource.COMMANDLINE
    predicted = prediction.predict(
        found.model,
        found.degrees,
        dims=found.dims,
        first_layers=found.first_layers,
        precision=precision if given or found.precision is None else found.precision,
        cache_dir=resolve_cache_dir(cache_dir, no_cache=no_cache),
        **request,
    )
    give_plan(predicted.plan, format_prediction(predicted.plan, predicted.timeline), output, as_json=as_json)
    return ExitCode.DONE
