"""A program as a file: with the graph it computes, so that it can be simulated and run by itself.

    // what a person may want to know
    program 1f1b microbatches=4
    ...                                the program, as `autopar.program.text` has it
    end
    weights zoo:gpt2 {"num_layers": 2}
    graph gpt2 opset=24
    ...                                one microbatch on one device, as `autopar.ir.text` has it

The line `weights` names the model that a run takes its first weights from; without it they are drawn. A second graph
follows if devices normalise their own samples: it is that of the samples of one device, which a run is compared with.
What a file cannot say is what it costs: the cluster, the software stack and the precision.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import msgspec

from autopar.discover import Rules
from autopar.discover.per_device import PER_DEVICE
from autopar.errors import GraphError, ProgramError
from autopar.escaping import is_plain, one_line
from autopar.folding.fold import Folded, fold
from autopar.ir.graph import Graph
from autopar.ir.text import format_graph, parse_graph
from autopar.ir.verify import verify
from autopar.onnx.types import check_types
from autopar.plan import DimSize
from autopar.program.line import COMMENT, Line, format_name
from autopar.program.records import Compute, Program
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.program.verify.fault import title
from autopar.shares import num_rows
from autopar.training.losses import LOSS_SCALE

_SHOWN = 60
"""Characters of a name that an error shows."""
_HINT = "`autopar explain PLAN --program` prints a program with its graph"


@dataclass(frozen=True, slots=True)
class Origin:
    """The model that weights are taken from.

    Attributes:
        source: Path of an ONNX file, `zoo:NAME` or `hf:PATH`.
        dims: Dynamic dims by name; fields of the configuration of a model of the zoo.
    """

    source: str
    dims: tuple[tuple[str, DimSize], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """A program with what it computes.

    Attributes:
        program: The instructions.
        graph: One microbatch on one device, blocks found.
        part: The graph of a part of a microbatch; see `part_counts`. None if a microbatch is one part.
        origin: Where weights are taken from; None if they are drawn.
    """

    program: Program
    graph: Graph
    part: Graph | None = None
    origin: Origin | None = None


def summary(program: Program) -> str:
    """Return a program in one line.

    >>> from autopar.program.records import StageProgram
    >>> from autopar.recompute import Recompute
    >>> from autopar.sharding import Mesh
    >>> stage = StageProgram(0, (0, 4), Mesh.of(dp=2, tp=2), (0,), (Recompute.NONE,), ())
    >>> summary(Program((stage,), (), "1f1b", 8))
    '4 GPUs = dp=2×tp=2, 8 microbatches'
    """
    meshes = " | ".join(str(stage.mesh) for stage in program.stages[: program.num_groups])
    schedule = f", schedule {program.schedule}" if len(program.stages) > 1 else ""
    counts = " or ".join(map(str, dict.fromkeys(share.num_microbatches for share in program.shares)))
    return f"{program.num_devices} GPUs = {meshes}, {counts or program.num_microbatches} microbatches{schedule}"


def part_counts(program: Program, graph: Graph) -> frozenset[int]:
    """Return into how many parts ops cut a microbatch whose devices normalise their own samples; nothing if none does.

    Rows with different shares of the microbatches have a part each, or several.

    Args:
        program: The program.
        graph: The graph of one microbatch.
    """
    found = {
        graph.values[each.op.inputs[0]].shape[0] // each.inputs[0].shape[0]
        for segment in program.segments
        for each in segment.instructions
        if isinstance(each, Compute) and each.op.attr(PER_DEVICE) and each.inputs[0] is not None
    }
    if program.shares:
        rows = num_rows(program.shares)
        return frozenset(lcm(count, rows) for count in found or {rows})
    return frozenset(found)


def format_listing(listing: Listing, comments: Iterable[str] = ()) -> str:
    """Return a listing as text, below comments of one line each."""
    parts = [f"{COMMENT} {one_line(comment)}\n" for comment in comments]
    parts.append(format_program(listing.program))
    if listing.origin is not None:
        dims = f" {json.dumps(dict(listing.origin.dims))}" if listing.origin.dims else ""
        parts.append(f"weights {format_name(listing.origin.source)}{dims}\n")
    parts.extend(format_graph(graph) for graph in (listing.graph, listing.part) if graph is not None)
    return "".join(parts)


def parse_listing(text: str) -> Listing:
    """Return the listing a text holds.

    Raises:
        ProgramError: If the text is malformed; the message has the line.
        GraphError: If the text of a graph is; likewise.
    """
    lines = text.split("\n")
    end = next((number for number, line in enumerate(lines) if line.rstrip() == "end"), len(lines))
    program = parse_program("\n".join(lines[: end + 1]))
    starts = [number for number, line in enumerate(lines) if number > end and line.startswith("graph ")]
    origin = _parse_origin(lines, range(end + 1, starts[0] if starts else len(lines)))
    if not starts:
        raise ProgramError(f"line {len(lines)}: expected a line that starts with 'graph' after 'end'", hint=_HINT)
    if len(starts) > 2:
        raise ProgramError(f"line {starts[2] + 1}: expected the end of the file after two graphs", hint=_HINT)
    graphs = [
        parse_graph("\n".join(lines[first:last]), first + 1)
        for first, last in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]
    return Listing(program, graphs[0], graphs[1] if len(graphs) > 1 else None, origin)


def _parse_origin(lines: Sequence[str], between: range) -> Origin | None:
    """Return what the lines between program and graph say about weights."""
    found: Origin | None = None
    for number in between:
        if not lines[number].strip() or lines[number].startswith(COMMENT):
            continue
        line = Line(number + 1, lines[number])
        if found is not None or not line.accept("weights"):
            raise line.fail("'graph'" if found is not None else "'weights' or 'graph'")
        source = line.name()
        found = Origin(source, _parse_dims(line) if line.text.startswith("{", line.at) else ())
        line.end()
    return found


def _parse_dims(line: Line) -> tuple[tuple[str, DimSize], ...]:
    """Read sizes by name."""
    column = line.at
    sizes = line.json()
    try:
        return tuple(msgspec.convert(sizes, dict[str, int | float | tuple[int, ...]]).items())
    except msgspec.ValidationError:
        line.at = column
        raise line.fail("sizes by name, each a number or a list of whole numbers,") from None


def read_listing(path: str | Path) -> Listing:
    """Return the listing a file holds; errors are those of `parse_listing`, and that the file cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ProgramError(f"cannot read program {str(path)!r}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise ProgramError(f"program {str(path)!r} is not text in UTF-8", hint=_HINT) from None
    return parse_listing(text)


def open_listing(listing: Listing) -> Folded:
    """Return the distinct blocks of a listing's graph, once everything is checked that does not take its rules.

    Raises:
        GraphError: If a graph breaks a law, or its types do not fit its ops.
        ProgramError: If the program breaks a law of programs, or does not compute the graph.
    """
    folded = _folded(listing.graph)
    if listing.part is not None:
        _folded(listing.part)
    kinds = {kind for stage in listing.program.stages for kind in stage.blocks}
    for segment in listing.program.segments:
        if segment.kind not in kinds:
            raise ProgramError(f"{title(segment)} belongs to no block of a stage", hint=_HINT)
    verify_program(listing.program, folded)
    return folded


def doubts(program: Program, folded: Folded, rules: Rules) -> tuple[str, ...]:
    """Return which ops run by no strategy of their rule, in a sentence each.

    Rules that are discovered at the sizes of a graph may lack strategies: dims that happen to be of one size are not
    told apart. So these ops need not be wrong.
    """
    found: list[str] = []
    verify_program(program, folded, rules, found.append)
    return tuple(found)


def _folded(graph: Graph) -> Folded:
    """Return the distinct blocks of a graph, whose laws and types are checked."""
    names = (graph.name, *graph.values, *(name for op in graph.ops for name in (op.name, op.kind, op.origin)))
    obeyed = next((name for name in names if not is_plain(name)), None)
    if obeyed is not None:
        raise GraphError(f"a name of the graph has control characters: {obeyed[:_SHOWN]!a}")
    verify(graph)
    blocks = {op.block for op in graph.ops}
    if blocks != set(range(len(blocks))):
        raise GraphError(
            f"the ops of graph {graph.name!r} are in blocks {', '.join(map(str, sorted(blocks)[:8]))}, not in a chain",
            hint="#0, #1, ... behind an op is its block",
        )
    scale = graph.metadata.get(LOSS_SCALE)
    if scale is not None and scale not in graph.constants:
        raise GraphError(f"the factor of the loss is {scale!r}, which is no constant of graph {graph.name!r}")
    check_types(graph, graph.ops)
    return fold(graph)
