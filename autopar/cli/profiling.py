"""The command that profiles the events of plans, or a machine without a model, and merges profiles."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.completion import complete_model
from autopar.cli.files import prepare_folder
from autopar.cli.options import (
    cache_options,
    cluster_option,
    echo_json,
    folder_option,
    json_option,
    model_options,
    resolve_cache_dir,
    seed_option,
    stack_option,
    training_options,
)
from autopar.cli.preflight import check_request
from autopar.cli.values import positive_number, positive_whole, precision_name
from autopar.display import show_progress

if TYPE_CHECKING:
    from autopar.profile.extract import Extraction

MERGE = "merge"
RUNTIMES = ("onnxruntime", "inductor")
"""As of `profile.fused_timing`, which is not imported for help texts."""


@click.command()
@click.argument("sources", metavar="[MODEL|PLAN.json...|merge DIR...]", nargs=-1, shell_complete=complete_model)
@click.option("--gpus", type=positive_whole(), metavar="N", help="Devices of the plans, if --degrees does not say.")
@click.option(
    "--degrees",
    multiple=True,
    metavar="'dp=2 tp=2 microbatch=4'",
    help="A plan whose events are profiled; can be repeated. Default: every dp x tp x pp of --gpus.",
)
@click.option("--global-batch", type=positive_whole(), default=8, show_default=True, metavar="B", help="Samples.")
@click.option("--suite", is_flag=True, help="Also products, memory-bound ops, attention, transfers and overlap.")
@click.option(
    "--fusion",
    is_flag=True,
    help="Instead: random groups of ops of the zoo as single kernels, for learned costs of fused ops. Needs torch.",
)
@click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    default=RUNTIMES[0],
    show_default=True,
    help="With --fusion: what runs groups. inductor is torch.compile: C++ on a CPU, Triton (not tried) on a GPU.",
)
@click.option(
    "--groups", type=positive_whole(), default=1500, show_default=True, metavar="N", help="With --fusion: structures."
)
@click.option(
    "--sizes", type=positive_whole(), default=1, show_default=True, metavar="N", help="With --fusion: of each."
)
@click.option(
    "--rounds",
    type=click.IntRange(min=2),
    default=6,
    show_default=True,
    metavar="N",
    help="With --fusion: rounds over all groups; the shortest call of all of them counts.",
)
@seed_option("With --fusion: seed of the groups drawn.")
@click.option("--count", "only_count", is_flag=True, help="Say how many events there are; time nothing.")
@click.option(
    "--ranks",
    type=positive_whole(),
    metavar="R",
    help="Processes that work at the same time; default: one per core, at most 8. torchrun says by itself.",
)
@click.option("--threads", type=positive_whole(), default=1, show_default=True, metavar="N", help="Threads of each.")
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    default="gloo",
    show_default=True,
    help="gloo, on CPUs; nccl, with a GPU each, has not been tried on hardware.",
)
@click.option(
    "--seconds", type=positive_number, default=0.3, show_default=True, metavar="S", help="For the calls of an event."
)
@click.option(
    "--precision",
    type=precision_name,
    default="fp32",
    show_default=True,
    metavar="NAME",
    help="What jobs that will use the profile are planned in; CPUs compute in fp32.",
)
@cluster_option
@stack_option
@training_options
@model_options
@folder_option("Folder of the profile; an existing one is continued.")
@cache_options
@json_option
def profile(
    sources: tuple[str, ...],
    gpus: int | None,
    degrees: tuple[str, ...],
    global_batch: int,
    suite: bool,
    fusion: bool,
    runtime: str,
    groups: int,
    sizes: int,
    rounds: int,
    seed: int,
    only_count: bool,
    ranks: int | None,
    threads: int,
    backend: str,
    seconds: float,
    precision: str,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    **request: Any,
) -> int:
    """Measure the distinct events of plans on this machine.

    Equal layers, microbatches and replicas share their events, so that few events tell what plans for any number of
    devices take. Started by torchrun, ranks are those of torchrun. `autopar profile merge A B -o C` puts profiles
    together. With --fusion random groups of ops of the zoo are timed as single kernels, from which
    docs/benchmarks/fused_kernels.py learns what fused ops take.
    """
    from autopar.report.profile import format_extraction, format_profile

    if sources[:1] == (MERGE,):
        return _merge(sources[1:], output, as_json=as_json)
    if fusion:
        if sources or suite or only_count:
            raise click.UsageError("--fusion times groups of its own: no model, --suite or --count beside it")
        return _time_groups(output, runtime, groups, sizes, rounds, seed, seconds)
    if not sources and not suite:
        raise click.UsageError("give a model, a plan.json, --suite or --fusion")
    if output is None and not only_count:
        raise click.UsageError("give -o DIR, the folder of the profile, or --count")
    from autopar.profile.extract import Extraction

    found = Extraction()
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    with show_progress() as progress:
        for source in sources:
            if source.endswith(".json"):
                _add_plan(source, found, precision, cache)
                continue
            check_request(source, request["dims"], request["cluster"])
            stated = {**request, "precision": precision, "cache_dir": cache}
            _add_model(source, gpus, degrees, global_batch, found, stated)
        count, local = _world(ranks, threads)
        if suite:
            from autopar.profile.suite import suite as events

            for task in events(count, local, precision):
                found.add(task)
        click.echo(format_extraction(found), nl=False, err=True)
        if only_count:
            if as_json:
                echo_json({"events": found.counts, "distinct": len(found.tasks), "unrolled": found.naive})
            return ExitCode.DONE
        from autopar.profile.measure import profile_events

        assert output is not None, "asked for above"
        database = profile_events(
            found.tasks.values(),
            prepare_folder(output),
            precision=precision,
            ranks=count,
            backend=backend,
            threads=threads,
            seconds=seconds,
            progress=progress,
        )
    if os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
        return ExitCode.DONE  # the first rank tells
    if as_json:
        echo_json({"events": len(database.events), "measured": database.num_measured, "digest": database.digest})
    else:
        click.echo(format_profile(database, output), nl=False)
    return ExitCode.DONE


def _time_groups(
    output: Path | None, runtime: str, groups: int, sizes: int, rounds: int, seed: int, seconds: float
) -> int:
    """Time random groups of ops; the file is written after every round but the first."""
    if output is None:
        raise click.UsageError("give -o DIR, the folder of the timed groups")
    import msgspec

    from autopar.profile.fused_timing import FILE, time_drawn
    from autopar.profile.measure import processor
    from autopar.writing import write_atomically

    file = prepare_folder(output) / FILE
    count = 0
    for timed in time_drawn(
        runtime, groups, sizes, seed, seconds, processor(), rounds, lambda told: click.echo(told, err=True)
    ):
        write_atomically(file, b"".join(msgspec.json.encode(own) + b"\n" for own in timed))
        count = len(timed)
    click.echo(f"{count} groups timed by {runtime}: {file}")
    return ExitCode.DONE


def _merge(folders: tuple[str, ...], output: Path | None, *, as_json: bool) -> int:
    if len(folders) < 2 or output is None:
        raise click.UsageError("merge takes two profiles or more, and -o DIR for what comes of them")
    from autopar.events import load_database, merge_databases, save_database
    from autopar.report.profile import format_profile

    database = merge_databases([load_database(folder) for folder in folders])
    save_database(database, prepare_folder(output))
    if as_json:
        echo_json({"events": len(database.events), "measured": database.num_measured, "digest": database.digest})
    else:
        click.echo(format_profile(database, output), nl=False)
    return ExitCode.DONE


def _world(ranks: int | None, threads: int) -> tuple[int, int]:
    """Return the ranks that work at the same time, and those of each node."""
    from autopar.machine import usable_cores

    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = ranks or max(1, min(8, usable_cores() // threads))
    return count, count


def _add_plan(source: str, found: "Extraction", precision: str, cache: Path | None) -> None:
    from autopar.errors import JobError
    from autopar.profile.plans import extract_plan

    own = extract_plan(Path(source), found, cache_dir=cache)
    if own != precision:
        raise JobError(f"{source} was planned in {own}, the profile is for {precision}", hint=f"--precision {own}")


def _add_model(
    source: str,
    gpus: int | None,
    degrees: tuple[str, ...],
    global_batch: int,
    found: "Extraction",
    stated: dict[str, Any],
) -> None:
    from autopar.errors import JobError
    from autopar.prediction import open_setting
    from autopar.profile.plans import every_split, extract_degrees, parse_degrees

    setting = open_setting(source, **stated)
    if degrees:
        plans = [parse_degrees(text, global_batch=global_batch) for text in degrees]
        wrong = next((plan for plan in plans if gpus is not None and plan.gpus != gpus), None)
        if wrong is not None:
            raise JobError(f"degrees are for {wrong.gpus} GPUs, not for {gpus}", hint=f"--gpus {wrong.gpus}")
        extract_degrees(setting, plans, found)
        return
    if gpus is None:
        raise click.UsageError("give --gpus N for all degrees of so many devices, or --degrees")
    plans = list(every_split(gpus, global_batch))
    left_out = extract_degrees(setting, plans, found, skip=True)
    if len(left_out) == len(plans):
        raise JobError(f"the model cannot be split over {gpus} GPUs: {left_out[0][1]}", hint="give --degrees")
    for plan, why in left_out:
        click.echo(f"left out dp={plan.dp} tp={plan.tp} pp={plan.pp}: {why}", err=True)
