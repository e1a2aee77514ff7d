"""The commands that show what is known: models of the zoo, clusters, software stacks, sharding rules."""

from pathlib import Path

import click

from autopar.cli.files import prepare_file
from autopar.cli.options import (
    cache_options,
    dims_option,
    echo_json,
    json_option,
    model_argument,
    model_options,
    resolve_cache_dir,
)
from autopar.cli.preflight import check_request
from autopar.cli.values import file_path
from autopar.escaping import one_line
from autopar.units import format_bytes


@click.command()
@model_argument
@model_options
@click.option("--op", "kind", metavar="KIND", help="Only ops of this kind, e.g. MatMul.")
@cache_options
@json_option
def rules(
    model: str,
    mode: str,
    dims: dict[str, int | float],
    kind: str | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Print how the ops of a model can be sharded.

    The rules are found by running each distinct op of MODEL on shards of its inputs.
    """
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    check_request(model, dims)
    from autopar import api
    from autopar.report import format_rules, rules_to_json

    found = api.rules(model, mode=mode, dims=dims, cache_dir=cache)
    if as_json:
        echo_json(rules_to_json(found, kind))
    else:
        click.echo(format_rules(found, kind), nl=False)


@click.command(name="model")
@click.argument("name", required=False)
@click.option("-o", "--output", type=file_path(), metavar="FILE.onnx", help="Where to write the model.")
@dims_option("Size in the model's configuration that shall differ, e.g. num_layers=4")
@click.option("--list", "list_all", is_flag=True, help="List the models of the zoo.")
@click.option(
    "--from",
    "configuration",
    type=file_path(),
    metavar="CONFIG",
    help="Write the model of a Hugging Face config.json, or of a folder with one.",
)
@json_option
def write_model(
    name: str | None,
    output: Path | None,
    dims: dict[str, int | float],
    list_all: bool,
    configuration: Path | None,
    as_json: bool,
) -> None:
    """Write a zoo or Hugging Face model as ONNX, or list the zoo.

    The file is ONNX without weights, so that it is small however large the model is.
    """
    if list_all:
        if name is not None or output is not None or dims or configuration is not None:
            raise click.UsageError("--list takes neither a name nor -o nor --set nor --from")
        _list_models(as_json)
        return
    if output is None or (name is None) == (configuration is None):
        raise click.UsageError("give a name or --from CONFIG, and -o FILE.onnx, or --list")
    if configuration is not None:
        _write_configuration(configuration, output, dims, as_json)
        return
    assert name is not None, "a name or a configuration was given"
    from autopar import models

    entry = models.spec(name.removeprefix("zoo:"))
    prepare_file(output)
    models.save(models.build(entry.name, **dims), output)
    size = output.stat().st_size
    if as_json:
        parameters = None if dims else entry.num_parameters
        echo_json({"name": entry.name, "parameters": parameters, "set": dims, "file": str(output), "bytes": size})
        return
    changed = ", ".join(f"{key}={value}" for key, value in dims.items()) or f"{entry.num_parameters:,} parameters"
    click.echo(one_line(f"wrote {output}: {entry.name}, {changed}, {format_bytes(size)} without weights"))


def _write_configuration(source: Path, output: Path, dims: dict[str, int | float], as_json: bool) -> None:
    """Write the model of a Hugging Face configuration."""
    import onnx

    from autopar import huggingface, models

    prepare_file(output)
    built = huggingface.build(source, dims)
    model = onnx.load(built, load_external_data=False) if isinstance(built, Path) else built
    models.save(model, output)
    size = output.stat().st_size
    if as_json:
        echo_json({"name": model.graph.name, "set": dims, "file": str(output), "bytes": size})
    else:
        click.echo(one_line(f"wrote {output}: {model.graph.name}, {format_bytes(size)} without weights"))


def _list_models(as_json: bool) -> None:
    from autopar import models
    from autopar.report.text import format_table

    entries = [models.spec(name) for name in models.names()]
    if as_json:
        echo_json(
            [
                {
                    "name": entry.name,
                    "parameters": entry.num_parameters,
                    "layers": entry.num_layers,
                    "sample": entry.sample,
                    "sample_size": entry.sample_size,
                    "global_batch": entry.global_batch,
                }
                for entry in entries
            ]
        )
        return
    rows = [
        (
            entry.name,
            f"{entry.num_parameters:,}",
            str(entry.num_layers),
            f"{entry.sample} of {entry.sample_size}",
            str(entry.global_batch),
        )
        for entry in entries
    ]
    header = ("name", "parameters", "layers", "one sample", "batch")
    click.echo("\n".join(format_table(header, rows)))


@click.command()
@click.argument("name", required=False)
@json_option
def clusters(name: str | None, as_json: bool) -> None:
    """List the clusters known by name, or show one in full.

    NAME is one of them or a YAML file. The text shown is a cluster file, with where its constants come from.
    """
    from autopar.cluster import PRESETS, format_cluster, load_cluster, sources
    from autopar.report.text import format_table

    if name is not None:
        cluster = load_cluster(name)
        if as_json:
            echo_json(cluster.to_dict())
            return
        known = sources(cluster)
        click.echo(
            "".join(f"# {field}: {source}\n" for field, source in known.items()) + format_cluster(cluster), nl=False
        )
        return
    if as_json:
        echo_json({name: cluster.to_dict() for name, cluster in PRESETS.items()})
        return
    rows = [
        (
            name,
            f"{cluster.devices_per_node} × {cluster.device.name}",
            format_bytes(cluster.device.memory),
            cluster.intra.tier,
            cluster.inter.tier,
        )
        for name, cluster in PRESETS.items()
    ]
    click.echo("\n".join(format_table(("name", "node", "memory", "inside a node", "between nodes"), rows)))


@click.command()
@json_option
def stacks(as_json: bool) -> None:
    """List the software stacks known by name.

    A YAML file with the fields that --json prints describes any other.
    """
    from autopar.cost import bundled_stacks
    from autopar.report.stacks import format_stacks

    if as_json:
        echo_json({name: stack.to_dict() for name, stack in bundled_stacks().items()})
    else:
        click.echo(format_stacks(bundled_stacks()), nl=False)
