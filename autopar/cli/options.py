"""Arguments and options that several commands share, each defined once."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.completion import complete_cluster, complete_model, complete_precision, complete_stack
from autopar.cli.files import prepare_folder
from autopar.cli.values import (
    bandwidth,
    dim_binding,
    file_path,
    folder_path,
    gigabytes,
    module_names,
    network_cards,
    not_negative,
    positive_number,
    positive_whole,
    precision_name,
    solver_name,
)

if TYPE_CHECKING:
    from autopar.cluster import Cluster

CACHE_VARIABLE = "AUTOPAR_CACHE_DIR"

Command = Callable[..., Any]
"""A function about to become a command."""
Option = Callable[[Command], Command]
"""What adds an argument or an option to it."""


def together(*options: Option) -> Option:
    """Return what adds several options, which help lists in this order."""

    def add(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _as_mapping(
    ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, int | float], ...]
) -> dict[str, int | float]:
    dims: dict[str, int | float] = {}
    for name, size in value:
        if dims.setdefault(name, size) != size:
            raise click.BadParameter(f"dim {name!r} is set to {dims[name]} and to {size}", ctx, param)
    return {**dims, **ctx.meta.get(_MORE_DIMS, {})}


_MORE_DIMS = "autopar.dims"
"""Key of a command's context: sizes of the model that have an option of their own."""


def _as_dim(ctx: click.Context, param: click.Parameter, value: float | None) -> None:
    if value is not None:
        ctx.meta.setdefault(_MORE_DIMS, {})[param.name] = value


def _in_bytes(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    return None if value is None else value * 1e9


# What is worked on.

model_argument = click.argument("model", shell_complete=complete_model)
plan_argument = click.argument("plan_file", metavar="PLAN", type=file_path())
executed_argument = click.argument("plan_file", metavar="PLAN|PROGRAM.txt", type=file_path())
moved_model_option = click.option("--model", help="Where the model is now, if it has moved since the plan was made.")


def dims_option(meaning: str) -> Option:
    """Return the option for sizes by name."""
    return click.option(
        "--set",
        "dims",
        type=dim_binding,
        multiple=True,
        callback=_as_mapping,
        metavar="DIM=VALUE",
        help=f"{meaning}; can be repeated.",
    )


model_options = together(
    click.option(
        "--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True, help="What a step is."
    ),
    dims_option("Size of a dynamic dim of the model, or of a zoo model's configuration"),
    click.option(
        "--expert-imbalance",
        type=positive_number,
        callback=_as_dim,
        expose_value=False,
        is_eager=True,  # before --set, which it adds to
        metavar="X",
        help="Tokens of the fullest device of a mixture of experts, relative to an even load; default: 1.",
    ),
)
training_options = together(
    click.option(
        "--loss",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="Loss of the training step: auto, cross-entropy, chunked-cross-entropy (never all logits at once), "
        "mse or mean.",
    ),
    click.option(
        "--optimizer",
        default="adam",
        show_default=True,
        metavar="NAME",
        help="adam, adamw, adamw-8bit, sgd, lion, muon or adafactor.",
    ),
    click.option(
        "--sync-batchnorm",
        is_flag=True,
        help="Batch normalisation in training with statistics of the whole batch; else each device has those of its own"
        " samples, as frameworks do by default.",
    ),
    click.option(
        "--lora",
        metavar="rank=R,...|FILE",
        help="Train low-rank adapters beside a frozen model: rank=16,alpha=32,targets=attention|mlp|all|NAME:NAME, with"
        " base=nf4 on 4-bit weights, pattern=REGEX last in place of targets; or peft's adapter_config.json. Default:"
        " the one in the folder of an hf: model; none for none.",
    ),
)

# What it runs on.

_CHANGES = "autopar.cluster"
"""Key of a command's context: what the options beside `--cluster` change about it."""


CLUSTER_CHANGES = ("intra_bandwidth", "inter_bandwidth", "nics", "gpu_hour_price")
"""Names of these options."""


def _as_change(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None:
        ctx.meta.setdefault(_CHANGES, {})[param.name] = value


def _as_cluster(ctx: click.Context, _param: click.Parameter, value: str) -> "str | Cluster":
    """Return the name of a cluster, or the cluster itself if other options change it."""
    changes = dict(ctx.meta.get(_CHANGES, {}))
    if not changes:
        return value
    from autopar.cluster import load_cluster

    cluster, price = load_cluster(value), changes.pop("gpu_hour_price", None)
    links = {name.removesuffix("_bandwidth"): change for name, change in changes.items()}
    cluster = cluster.linked(**links) if links else cluster
    return cluster if price is None else cluster.priced(price)


def _change(name: str, metavar: str, kind: Callable[[str], object], text: str) -> Option:
    """Return an option that changes the cluster; it is read before `--cluster`, wherever it stands."""
    return click.option(
        name, type=kind, callback=_as_change, expose_value=False, is_eager=True, metavar=metavar, help=text
    )


cluster_option = together(
    click.option(
        "--cluster",
        default="h100",
        show_default=True,
        metavar="NAME|FILE",
        shell_complete=complete_cluster,
        callback=_as_cluster,
        help="Preset or YAML file.",
    ),
    _change(
        "--intra-bandwidth",
        "X",
        bandwidth,
        "What each GPU reaches inside a node, e.g. 360GB/s; default: the cluster's.",
    ),
    _change(
        "--inter-bandwidth", "X", bandwidth, "What each GPU reaches between nodes, e.g. 25GB/s; default: the cluster's."
    ),
    _change(
        "--nics", "NxRATE", network_cards, "Network cards of a node, e.g. 8x400Gb/s, in place of --inter-bandwidth."
    ),
    _change("--gpu-hour-price", "X", positive_number, "Price of a GPU for an hour; default: the cluster file's."),
)
stack_option = click.option(
    "--stack",
    default="default",
    show_default=True,
    metavar="NAME|FILE",
    shell_complete=complete_stack,
    help="Software that runs the plan: one of `autopar stacks` (ideal: what the data sheet says), or a YAML file; "
    "default: the one nearest to the cluster of those that were fitted to measured steps.",
)
other_stack_option = click.option(
    "--stack", metavar="NAME|FILE", help="Another software stack than the one the plan was made for."
)
profile_option = click.option(
    "--profile",
    type=file_path(),
    metavar="DIR",
    help="Measured events, as `autopar profile` writes them: their seconds count in place of formulas.",
)
precision_option = click.option(
    "--precision",
    type=precision_name,
    default="mixed",
    show_default=True,
    metavar="NAME[,CHANGE=BITS]",
    shell_complete=complete_precision,
    help="What is stored and multiplied in which precision: bf16 (mixed), fp16, fp8, fp8-current, fp8-block, mxfp8, "
    "nvfp4, int8-current, int8, fsdp, tf32, fp32; changes are weights=low, gradients=16, reduce=16, moments=8 or 16. "
    "`docs/memory_costs.md` has the bytes.",
)
recompute_modules_option = click.option(
    "--recompute-modules",
    type=module_names,
    default="",
    metavar="NAME,NAME,...",
    help="What selective recompute runs again in a layer: core_attn, layernorm, mla_up_proj, activation, mlp, moe_act, "
    "shared_experts, moe; default: what frees the most bytes for its seconds.",
)
shared_overlap_option = click.option(
    "--shared-expert-overlap/--no-shared-expert-overlap",
    default=None,
    help="Whether tokens travel to experts and back beside the shared experts of their layer; default: what the stack "
    "says.",
)
program_options = together(
    click.option(
        "--cluster",
        metavar="NAME|FILE",
        shell_complete=complete_cluster,
        help="What a program runs on: preset or YAML file; default: h100. A plan has its own.",
    ),
    click.option(
        "--precision",
        type=precision_name,
        metavar="NAME",
        shell_complete=complete_precision,
        help="What a program computes in; default: mixed. A plan has its own.",
    ),
)
"""What the text of a program cannot say."""
memory_limit_option = click.option(
    "--memory-limit",
    type=gigabytes,
    callback=_in_bytes,
    metavar="GB",
    help="Memory a plan may use per device, in 1e9 bytes; default: what the device has, less a reserve.",
)
global_batch_option = click.option(
    "--global-batch", type=positive_whole(), metavar="B", help="Samples per step; default: the model's own."
)

# How hard to look.

solver_option = click.option(
    "--solver", type=solver_name, default="auto", show_default=True, metavar="NAME", help="Solver of the placements."
)


def time_limit_option(meaning: str, default: float | None = None) -> Option:
    """Return the option for how long to look.

    Args:
        meaning: What the seconds are for.
        default: Seconds if nobody says; None for no limit.
    """
    shown: dict[str, Any] = {} if default is None else {"default": default, "show_default": True}
    return click.option("--time-limit", type=positive_number, metavar="S", help=meaning, **shown)


def top_k_option(meaning: str) -> Option:
    """Return the option for the number of plans wanted."""
    return click.option("--top-k", type=positive_whole(), default=3, show_default=True, metavar="K", help=meaning)


def seed_option(meaning: str) -> Option:
    """Return the option for a seed."""
    return click.option("--seed", type=not_negative(), default=0, show_default=True, metavar="N", help=meaning)


def engine_options_for(work: str, default: str) -> Option:
    """Return what adds the options for the processes of a command.

    Args:
        work: What the processes do.
        default: Their number if nobody says.
    """
    return together(
        click.option(
            "--workers",
            type=positive_whole(),
            metavar="N",
            help=f"Processes that {work}; default: {default}, or with Ray per CPU of the cluster.",
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


engine_options = engine_options_for("search", "one per core, up to 8")


def job_options(*, gpus_required: bool = True, limit: str = "Seconds after which the best plan is taken.") -> Option:
    """Return what adds the options that say what is to be planned, and how hard to look for it.

    Args:
        gpus_required: Whether the number of devices has to be stated.
        limit: What the time limit is for.
    """
    return together(
        click.option("--gpus", type=positive_whole(), required=gpus_required, metavar="N", help="Number of devices."),
        cluster_option,
        stack_option,
        precision_option,
        global_batch_option,
        memory_limit_option,
        training_options,
        solver_option,
        time_limit_option(limit),
    )


# What becomes of the answer.

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else on standard output.")
cache_options = together(
    click.option("--no-cache", is_flag=True, help="Neither read nor write the cache."),
    click.option(
        "--cache-dir",
        type=folder_path(),
        envvar=CACHE_VARIABLE,
        show_envvar=True,
        help="Where discovered rules and plans found are kept; default: the user's cache folder.",
    ),
)


def folder_option(meaning: str, *, required: bool = False) -> Option:
    """Return the option for the folder that is written to."""
    return click.option("-o", "--output", type=file_path(), required=required, metavar="DIR", help=meaning)


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


def as_json_text(value: Any) -> str:
    """Return a value as indented JSON."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def echo_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(as_json_text(value))
