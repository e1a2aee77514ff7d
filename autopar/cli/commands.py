"""The commands by name: each checks what it was given, calls one public function and prints its result.

Heavy parts are imported inside the commands, so that `autopar --help` answers at once.
"""

from pathlib import Path

import click

from autopar import __version__
from autopar.cli.benchmarking import benchmark
from autopar.cli.catalogues import clusters, rules, stacks, write_model
from autopar.cli.completion import completion
from autopar.cli.doctor import doctor
from autopar.cli.executing import run, simulate
from autopar.cli.explaining import explain
from autopar.cli.exporting import export, import_config
from autopar.cli.fitting import fit
from autopar.cli.foreign import aceso
from autopar.cli.fusing import fuse
from autopar.cli.job_file import JOB_FILE, read_job_file
from autopar.cli.looking import figures, report
from autopar.cli.partitioning import diff, partition
from autopar.cli.predicting import predict
from autopar.cli.profiling import profile
from autopar.cli.scheduling import schedules
from autopar.cli.selecting import select
from autopar.cli.solving import solve
from autopar.cli.validating import calibrate, validate
from autopar.cli.values import file_path
from autopar.cli.whatif import whatif

SECTIONS = {
    "Find a plan": (solve, fit, whatif),
    "Judge a plan": (predict, import_config, benchmark, validate),
    "Understand a plan": (explain, diff, simulate, report, figures),
    "Use a plan": (export, run),
    "Measure": (profile, calibrate),
    "Shard by hand": (partition, rules, fuse, select, aceso),
    "Look up": (write_model, clusters, stacks, schedules, doctor, completion),
}
"""The commands, as the help lists them."""

COMMANDS = tuple(command for commands in SECTIONS.values() for command in commands)


class _Sections(click.Group):
    """Lists its commands by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section with their first sentences."""
        width = max(len(str(command.name)) for command in COMMANDS)
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                limit = formatter.width - formatter.current_indent - width - 2
                formatter.write_dl(
                    [(str(own.name).ljust(width), own.get_short_help_str(limit)) for own in commands], col_spacing=2
                )


@click.group(cls=_Sections, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autopar")
@click.option(
    "--job",
    type=file_path(),
    metavar="FILE",
    help=f"Job file: options in TOML; default: {JOB_FILE} if the current folder has one.",
)
@click.pass_context
def app(context: click.Context, job: Path | None) -> None:
    """Find out how to parallelise a model over a cluster.

    MODEL is an .onnx file, a model of the zoo, such as zoo:gpt2, or a local Hugging Face configuration, such as
    hf:config.json. No command needs a GPU.
    """
    path = job or Path(JOB_FILE)
    if job is not None or path.exists():
        assert isinstance(context.command, click.Group)
        context.default_map = read_job_file(path, context.command.commands)
        click.echo(f"job file {path}", err=True)


for _command in COMMANDS:
    app.add_command(_command)
