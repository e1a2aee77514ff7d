"""Completion by the shell: the script that switches it on, and what it offers for models, clusters and stacks."""

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes SHELL complete commands, options and names.

    For bash: autopar completion bash >> ~/.bashrc, and a new shell.
    """
    root = context.find_root()
    script = get_completion_class(shell)
    assert script is not None, f"click completes in {shell}"
    click.echo(script(root.command, {}, "autopar", "_AUTOPAR_COMPLETE").source())


def complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the models of the zoo that begin like this, and leave files to the shell."""
    from autopar import models

    names = [CompletionItem(f"zoo:{name}") for name in models.names() if f"zoo:{name}".startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


def complete_cluster(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the clusters that begin like this, and leave files to the shell."""
    from autopar.cluster import PRESETS

    names = [CompletionItem(name) for name in PRESETS if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]


def complete_precision(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the precisions that begin like this."""
    from autopar.cost.policy import ALIASES, POLICIES

    return [CompletionItem(name) for name in (*ALIASES, *POLICIES) if name.startswith(incomplete)]


def complete_stack(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the stacks that begin like this, and leave files to the shell."""
    from autopar.cost import bundled_stacks

    names = [CompletionItem(name) for name in bundled_stacks() if name.startswith(incomplete)]
    return [*names, CompletionItem(incomplete, type="file")]
