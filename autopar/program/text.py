"""A program as text, for reading and for keeping: `parse_program(format_program(p)) == p`.

    program 1f1b microbatches=4
    stage 0 devices=0:8 mesh=(dp: 4/2, tp: 2/1) blocks=(0, 1, 1) recompute=none
      resident parameters: 4096
    segment 1 forward
      input x: [2, 4] S(0)S(1) 16
      external w: [4, 4] RS(0) 32
      y: [2, 4] S(0)P 16 = MatMul(x, w) op=mm phase=forward block=3
      z: [2, 4] S(0)R 16 = all_reduce(y) axis=(tp: 2/1) P->R bytes=16
      v: [1, 4] S(0)S(0) 8 = slice(z) axis=(tp: 2/1) R->S(0)
      u: [4, 4] S(0)R 32 = exchange(z) axis=(dp: 4/2) dim=0 before=1 after=1 fill=zero bytes=16
      saved x
      output z
      part x h.0
    crossing 0->1 forward h.2
      source y: [2, 4] S(0)R 16
      target x: [4, 2] S(1) 16
      piece 0->8 [0:2, 0:2]
    end

A value is written with its local shape, placements and bytes where it is defined, and by its name where it is read; `_`
is an output nobody asked for, `-` an absent input. A mesh axis is `name: size/stride`. Names that are not plain words
are in JSON quotes; attributes are JSON. `constants=(1: [2, 8])` replaces the content of a constant input,
`start=(dp: 4/2) rows=2` tells the op in one more input where the block of the device starts, `kept=64` what its kernel
keeps for its gradient, `unit=dense` that a parameter is gathered with the others of its block that say so, `kernel=a`
the first op of its kernel, `again=(b)` which ops that kernel runs besides their own.
What the blocks of a stage keep is one word, or one per block: `recompute=(full, none, none)`.
Copies to and from host memory are `x|host: [2, 4] S(0)S(1) 16 = offload(x) bytes=16` and `x: ... = fetch(x|host)
bytes=16`; what of a stage's persistent memory is on its host is in lines `hosted optimizer: 8192`, and in
`hosted optimizer: 8192 blocks=(0, 1)` if it is that of the first two blocks only, `hosted optimizer: 8192 copies=1024`
if some of it is the state of copies of parameters that other stages own; `offload=parameters` at the end of a stage's
line says that its parameters are there, too. A line
`buckets all_reduce axis=dp per=step hops=0 ends=(3, 8)` says that the first three gradients it makes for that
collective travel together, and the next five; without one gradients share buckets by the uniform rule.
Rows of the major mesh axis that run different numbers of microbatches follow these, `shares=(0:1 4, 1:2 3)`.
Stages of another variant than the first say which, `variant=1`. A crossing names both stages and the tensor, and the
value on either of them; a piece goes from device to device, and is a range per dim of the whole tensor.

Blank lines and lines that start with `//` are skipped. Whole numbers have up to 63 bits, other numbers are finite, and
sizes in bytes are not negative.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from autopar.cost.collectives import Collective as CollectiveKind
from autopar.errors import ProgramError
from autopar.escaping import is_plain
from autopar.fusion_plan import MICROBATCH, STEP, BucketCuts
from autopar.ir.graph import Attr, Cast, LinearProduct, Op, Phase, parse_linear
from autopar.ir.routing import Routed, Routing
from autopar.program.line import COMMENT, MAX_WHOLE, Line, format_name
from autopar.program.records import (
    Category,
    Collective,
    Compute,
    Crossing,
    Exchange,
    Fetch,
    HostCopy,
    Instruction,
    Offload,
    Operand,
    Part,
    Piece,
    Program,
    Resident,
    Segment,
    SegmentPhase,
    Slice,
    StageProgram,
    Store,
    collective_kind,
    forward_values,
    saved_for,
)
from autopar.recompute import FLAVOURS, STATE_KINDS, Hosted, Recompute
from autopar.sharding import Axis, Mesh, Replicate, Shard, format_placements
from autopar.shares import Share

_LINEAR = re.compile(f"({'|'.join(LinearProduct)})/({'|'.join(Cast)})(/kept)?")
_RESIDENT = re.compile("parameters|gradients|optimizer|buffers")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _list(items: Iterable[object]) -> str:
    return f"({', '.join(map(str, items))})"


def _axis(axis: Axis) -> str:
    return f"{format_name(axis.name)}: {axis.size}/{axis.stride}"


def _recompute(flavours: Sequence[Recompute]) -> str:
    return str(flavours[0]) if len(set(flavours)) == 1 else _list(flavours)


def _buckets(cuts: BucketCuts) -> str:
    where = f"axis={format_name(cuts.axis)} per={cuts.per} hops={cuts.hops}"
    return f"buckets {cuts.collective} {where} ends={_list(cuts.ends)}"


def _definition(operand: Operand | None) -> str:
    if operand is None:
        return "_"
    parts = [f"{format_name(operand.value)}: [{', '.join(map(str, operand.shape))}]"]
    if operand.placements:
        parts.append(format_placements(operand.placements))
    return " ".join([*parts, _number(operand.bytes)])


def _reference(operand: Operand | None) -> str:
    return "-" if operand is None else format_name(operand.value)


def _values(operands: Iterable[Operand | None]) -> tuple[str, ...]:
    return tuple("" if operand is None else operand.value for operand in operands)


def _compute(compute: Compute) -> str:
    op = compute.op
    results, operands = ", ".join(map(_definition, compute.outputs)), _list(map(_reference, compute.inputs))
    parts = [f"{results} = {format_name(op.kind)}{operands}"]
    if op.attrs:
        parts.append(json.dumps(dict(op.attrs)))
    parts.append(f"op={format_name(op.name)} phase={op.phase} block={op.block}")
    if op.origin:
        parts.append(f"origin={format_name(op.origin)}")
    if op.linear is not None:
        parts.append(f"linear={op.linear}")
    # the names the graph gives its values, where the program has others
    if op.inputs != _values(compute.inputs):
        parts.append(f"reads={_list(map(format_name, op.inputs))}")
    if op.outputs != _values(compute.outputs):
        parts.append(f"defines={_list(map(format_name, op.outputs))}")
    if compute.constants:
        contents = (f"{index}: [{', '.join(map(str, content))}]" for index, content in compute.constants)
        parts.append(f"constants={_list(contents)}")
    if compute.start is not None:
        parts.append(f"start={_list(map(_axis, compute.start.axes))} rows={compute.start.rows}")
    if compute.kept:
        parts.append(f"kept={_number(compute.kept)}")
    if compute.kernel:
        parts.append(f"kernel={format_name(compute.kernel)}")
    if compute.again:
        parts.append(f"again={_list(map(format_name, compute.again))}")
    if compute.shared:
        parts.append("shared")
    return " ".join(parts)


def _routed(routed: Routed) -> str:
    own = routed.routing
    return _list(map(str, (own.experts, own.top_k, own.groups, own.chosen_groups, routed.parts)))


def format_instruction(instruction: Instruction) -> str:
    """Return an instruction as one line."""
    match instruction:
        case Compute():
            return _compute(instruction)
        case Collective(kind=kind, axis=axis, source=source, target=target, operand=operand, result=result):
            line = (
                f"{_definition(result)} = {kind}({format_name(operand.value)}) axis=({_axis(axis)}) {source}->{target}"
            )
            line = f"{line} bytes={_number(instruction.bytes)}{' overlaps' if instruction.overlaps else ''}"
            line = line if instruction.routed is None else f"{line} routed={_routed(instruction.routed)}"
            return f"{line} unit={format_name(instruction.unit)}" if instruction.unit else line
        case Slice(axis=axis, target=target, operand=operand, result=result):
            return f"{_definition(result)} = slice({format_name(operand.value)}) axis=({_axis(axis)}) R->{target}"
        case Offload(operand=operand, result=result):
            return f"{_definition(result)} = offload({format_name(operand.value)}) bytes={_number(instruction.bytes)}"
        case Fetch(operand=operand, result=result):
            return f"{_definition(result)} = fetch({format_name(operand.value)}) bytes={_number(instruction.bytes)}"
        case Exchange(axis=axis, operand=operand, result=result):
            line = f"{_definition(result)} = exchange({format_name(operand.value)}) axis=({_axis(axis)})"
            rows = f"dim={instruction.dim} before={instruction.before} after={instruction.after}"
            return f"{line} {rows} fill={format_name(instruction.fill)} bytes={_number(instruction.bytes)}"
        case _:
            assert_never(instruction)


def _segment_lines(segment: Segment) -> Iterator[str]:
    yield f"segment {segment.kind} {segment.phase}"
    yield from (f"  input {_definition(operand)}" for operand in segment.inputs)
    yield from (f"  external {_definition(operand)}" for operand in segment.external)
    yield from (f"  {format_instruction(instruction)}" for instruction in segment.instructions)
    yield from (f"  saved {format_name(operand.value)}" for operand in segment.saved)
    yield from (f"  output {format_name(operand.value)}" for operand in segment.outputs)
    yield from (f"  store {format_name(store.value.value)} {format_name(store.target)}" for store in segment.stores)
    yield from (f"  export {format_name(operand.value)}" for operand in segment.exports)
    yield from (f"  part {format_name(part.value)} {format_name(part.tensor)}" for part in segment.parts)


def _crossing_lines(crossing: Crossing) -> Iterator[str]:
    yield f"crossing {crossing.sender}->{crossing.receiver} {crossing.phase} {format_name(crossing.tensor)}"
    yield f"  source {_definition(crossing.source)}"
    yield f"  target {_definition(crossing.target)}"
    for piece in crossing.pieces:
        ranges = ", ".join(f"{start}:{stop}" for start, stop in piece.box)
        yield f"  piece {piece.sender}->{piece.receiver} [{ranges}]"


def format_program(program: Program) -> str:
    """Return a program as text; segments in their order, stages before them, crossings behind."""
    shares = ", ".join(f"{share.rows[0]}:{share.rows[1]} {share.num_microbatches}" for share in program.shares)
    lines = [
        f"program {program.schedule} microbatches={program.num_microbatches}{f' shares=({shares})' if shares else ''}"
    ]
    for stage in program.stages:
        first, last = stage.devices
        lines.append(
            f"stage {stage.index} devices={first}:{last} mesh={_list(map(_axis, stage.mesh.axes))} "
            f"blocks={_list(stage.blocks)} recompute={_recompute(stage.recompute)}"
            f"{f' variant={stage.variant}' if stage.variant else ''}"
            f"{f' offload={stage.what}' if stage.what is not Hosted.OPTIMIZER else ''}"
        )
        lines.extend(f"  resident {resident.category}: {_number(resident.bytes)}" for resident in stage.resident)
        away = [block for block, is_away in enumerate(stage.away) if is_away]
        which = f" blocks={_list(away)}" if away else ""
        which += f" copies={_number(stage.hosted_copies)}" if stage.hosted_copies else ""
        lines.extend(f"  hosted {resident.category}: {_number(resident.bytes)}{which}" for resident in stage.hosted)
        lines.extend(f"  {_buckets(cuts)}" for cuts in stage.buckets)
    for segment in program.segments:
        lines.extend(_segment_lines(segment))
    for crossing in program.crossings:
        lines.extend(_crossing_lines(crossing))
    return "\n".join([*lines, "end", ""])


def _share(line: Line) -> Share:
    first = line.integer(0)
    line.expect(":")
    return Share((first, line.integer(0)), line.integer(1))


def _attrs(line: Line) -> tuple[tuple[str, Attr], ...]:
    column = line.at
    found = line.json()
    if isinstance(found, dict):
        attrs = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in found.items())
        if all(is_plain(key) and _is_attr(value) for key, value in attrs):
            return attrs
    line.at = column
    raise line.fail("attributes, each a whole number, a number, a text or a list of one of these,")


def _is_attr(value: object) -> bool:
    """Whether a value may be an attribute; bool is no type of those."""
    items = value if isinstance(value, tuple) else (value,)
    kinds = {type(item) for item in items}
    if len(kinds) > 1 or not kinds <= {int, float, str}:
        return False
    return all(
        is_plain(item) if isinstance(item, str) else isinstance(item, float) or abs(item) < MAX_WHOLE for item in items
    )


class _Scope:
    """The values of one segment by name."""

    def __init__(self, saved: Iterable[Operand]) -> None:
        self.operands = {operand.value: operand for operand in saved}

    def define(self, operand: Operand | None) -> None:
        if operand is not None:
            self.operands[operand.value] = operand

    def find(self, line: Line) -> Operand:
        column = line.at
        name = line.name()
        if name not in self.operands:
            line.at = column
            raise line.fail("the name of a value defined before")
        return self.operands[name]

    def find_optional(self, line: Line) -> Operand | None:
        if line.text[line.at : line.at + 2] in ("-,", "-)"):
            line.expect("-")
            return None
        return self.find(line)


def _parse_instruction(line: Line, scope: _Scope) -> Instruction:
    outputs: list[Operand | None] = []
    while not line.accept("="):
        if outputs:
            line.expect(",")
        outputs.append(line.definition())
    kind = line.name()
    inputs = line.sequence(lambda: scope.find_optional(line))
    if line.accept("axis="):
        return _parse_move(line, kind, inputs, outputs)
    if line.accept("bytes="):
        return _parse_copy(line, kind, inputs, outputs)
    attrs = _attrs(line) if line.text.startswith("{", line.at) else ()
    line.expect("op=")
    name = line.name()
    line.expect("phase=")
    phase = line.match(re.compile("|".join(Phase)), "a phase")
    line.expect("block=")
    block = line.integer(-1)
    op = Op(
        name=name,
        kind=kind,
        attrs=attrs,
        phase=Phase(phase),
        block=block,
        origin=line.name() if line.accept("origin=") else "",
        linear=parse_linear(line.match(_LINEAR, "a product of a linear layer")) if line.accept("linear=") else None,
        inputs=line.sequence(line.name) if line.accept("reads=") else _values(inputs),
        outputs=line.sequence(line.name) if line.accept("defines=") else _values(outputs),
    )
    constants = line.sequence(line.numbered) if line.accept("constants=") else ()
    start = line.start() if line.accept("start=") else None
    kept = line.size() if line.accept("kept=") else 0.0
    kernel = line.name() if line.accept("kernel=") else ""
    again = line.sequence(line.name) if line.accept("again=") else ()
    shared = line.accept("shared")
    return Compute(op, inputs, tuple(outputs), constants, start, kept, kernel, again, shared)


def _parse_copy(line: Line, kind: str, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]) -> HostCopy:
    values = (*inputs, *outputs)
    if kind not in ("offload", "fetch") or len(values) != 2 or values[0] is None or values[1] is None:
        raise line.fail("offload or fetch of one value before its bytes,")
    size = line.size()
    return Offload(values[0], values[1], size) if kind == "offload" else Fetch(values[0], values[1], size)


def _parse_move(
    line: Line, kind: str, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]
) -> Collective | Slice | Exchange:
    (axis,) = line.sequence(line.axis) or (None,)
    if axis is None or len(inputs) != 1 or len(outputs) != 1:
        raise line.fail("one axis, one value read and one defined")
    operand, result = inputs[0], outputs[0]
    if operand is None or result is None:
        raise line.fail("one value read and one defined")
    if kind == "exchange":
        dim, before, after = line.labelled("dim"), line.labelled("before"), line.labelled("after")
        line.expect("fill=")
        fill = line.name()
        line.expect("bytes=")
        return Exchange(axis, dim, before, after, fill, operand, result, line.size())
    if kind != "slice" and kind not in set(CollectiveKind):
        raise line.fail(f"one of {', '.join(CollectiveKind)}, slice, exchange before the axis, not {kind},")
    column = line.at
    source = line.placement()
    line.expect("->")
    target = line.placement()
    if kind == "slice" and source == Replicate() and isinstance(target, Shard):
        return Slice(axis, target, operand, result)
    if kind != collective_kind(source, target):
        line.at = column
        raise line.fail(f"placements that {kind} turns into each other")
    line.expect("bytes=")
    size = line.size()
    overlaps = line.accept("overlaps")
    routed = _parse_routed(line) if line.accept("routed=") else None
    unit = line.name() if line.accept("unit=") else ""
    return Collective(CollectiveKind(kind), axis, source, target, operand, result, size, overlaps, routed, unit)


def _parse_routed(line: Line) -> Routed:
    column = line.at
    numbers = line.sequence(lambda: line.integer(0))
    if len(numbers) != 5 or not 0 < numbers[1] <= numbers[0] or not 0 < numbers[3] <= numbers[2]:
        line.at = column
        raise line.fail("experts, experts of a token, groups, groups of a token and parts")
    return Routed(Routing(*numbers[:4]), numbers[4])


def _parse_segment(header: Line, lines: Sequence[Line], earlier: Sequence[Segment]) -> Segment:
    kind = header.integer()
    phase = SegmentPhase(header.match(re.compile("|".join(SegmentPhase)), "a phase"))
    header.end()
    scope = _Scope(_found(kind, phase, earlier))
    defined: dict[str, list[Operand]] = {"input": [], "external": []}
    named: dict[str, list[Operand]] = {"saved": [], "output": [], "export": []}
    instructions: list[Instruction] = []
    stores: list[Store] = []
    parts: list[Part] = []
    for line in lines:
        # a keyword is followed by a name, a value that happens to be called so by a colon
        word = re.match(r"(input|external|saved|output|store|export|part) (?!=)", line.text[line.at :])
        keyword = word[1] if word else ""
        line.accept(keyword)
        if keyword in defined:
            operand = line.operand()
            scope.define(operand)
            defined[keyword].append(operand)
        elif keyword in named:
            named[keyword].append(scope.find(line))
        elif keyword == "store":
            stores.append(Store(scope.find(line), line.name()))
        elif keyword == "part":
            parts.append(Part(line.name(), line.name()))
        else:
            instruction = _parse_instruction(line, scope)
            for result in instruction.outputs if isinstance(instruction, Compute) else (instruction.result,):
                scope.define(result)
            instructions.append(instruction)
        line.end()
    return Segment(
        kind,
        phase,
        inputs=tuple(defined["input"]),
        external=tuple(defined["external"]),
        instructions=tuple(instructions),
        saved=tuple(named["saved"]),
        outputs=tuple(named["output"]),
        stores=tuple(stores),
        exports=tuple(named["export"]),
        parts=tuple(parts),
    )


def _found(kind: int, phase: SegmentPhase, earlier: Sequence[Segment]) -> Iterable[Operand]:
    """Return the values a segment may name because earlier ones of its kind made them."""
    table = {(segment.kind, segment.phase): segment for segment in earlier}
    if phase is SegmentPhase.AGAIN:
        forward = table.get((kind, SegmentPhase.FORWARD))
        return () if forward is None else forward_values(forward)
    return saved_for(kind, phase, table)


def _parse_stage(header: Line, lines: Iterable[Line]) -> StageProgram:
    index = header.integer()
    header.expect("devices=")
    first = header.integer()
    header.expect(":")
    last = header.integer()
    header.expect("mesh=")
    mesh = Mesh(header.sequence(header.axis))
    header.expect("blocks=")
    blocks = header.sequence(header.integer)
    header.expect("recompute=")
    flavour = re.compile("|".join(Recompute))
    if header.text.startswith("(", header.at):
        recompute = header.sequence(lambda: Recompute(header.match(flavour, FLAVOURS)))
    else:
        recompute = (Recompute(header.match(flavour, FLAVOURS)),) * len(blocks)
    variant = header.integer() if header.accept("variant=") else 0
    what = Hosted.OPTIMIZER
    if header.accept("offload="):
        what = Hosted(header.match(re.compile("|".join(STATE_KINDS)), "a kind of state in host memory"))
    header.end()
    resident: list[Resident] = []
    hosted: list[Resident] = []
    buckets: list[BucketCuts] = []
    away: tuple[int, ...] = ()
    copied = 0.0
    for line in lines:
        if line.accept("buckets"):
            buckets.append(_parse_buckets(line))
            continue
        found = hosted if line.accept("hosted") else resident
        if found is resident:
            line.expect("resident")
        category = Category(line.match(_RESIDENT, "a category of memory that outlives a step"))
        line.expect(":")
        found.append(Resident(category, line.size()))
        if found is hosted and line.accept("blocks="):
            away = line.sequence(line.integer)
            if not 0 < len(away) < len(blocks) or not 0 <= min(away) <= max(away) < len(blocks):
                raise line.fail("some of the blocks of the stage, by position, but not all,")
        if found is hosted and line.accept("copies="):
            copied = line.size()
        line.end()
    each = tuple(block in away for block in range(len(blocks))) if away else ()
    return StageProgram(
        index, (first, last), mesh, blocks, recompute,
        tuple(resident), variant, tuple(hosted), each, tuple(buckets), copied, what,
    )  # fmt: skip


def _parse_buckets(line: Line) -> BucketCuts:
    collective = line.match(re.compile("|".join(CollectiveKind)), "a collective")
    line.expect("axis=")
    axis = line.name()
    line.expect("per=")
    per = line.match(re.compile(f"{STEP}|{MICROBATCH}"), f"{STEP} or {MICROBATCH}")
    hops = line.labelled("hops")
    line.expect("ends=")
    cuts = BucketCuts(collective, axis, per, hops, line.sequence(line.integer))
    line.end()
    return cuts


def _parse_crossing(header: Line, lines: Sequence[Line]) -> Crossing:
    sender, receiver = header.arrow()
    phase = SegmentPhase(header.match(re.compile("|".join(SegmentPhase)), "a phase"))
    tensor = header.name()
    header.end()
    sides: dict[str, Operand] = {}
    pieces: list[Piece] = []
    for line in lines:
        word = line.match(re.compile("source|target|piece"), "source, target or piece")
        if word == "piece":
            pieces.append(Piece(*line.arrow(), line.sequence(line.range, "[", "]")))
        else:
            sides[word] = line.operand()
        line.end()
    for word in ("source", "target"):
        if word not in sides:
            raise header.fail(f"a line that starts with {word!r} below")
    return Crossing(sender, receiver, phase, tensor, sides["source"], sides["target"], tuple(pieces))


def parse_program(text: str) -> Program:
    """Return the program a text describes.

    The forward of a block has to come before its backward, and that before its weight segment, as `saved` values are
    named there only.

    Raises:
        ProgramError: If the text is malformed; the message points at the place.
    """
    groups: list[list[Line]] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip() or raw.lstrip().startswith(COMMENT):
            continue
        if raw.startswith(" ") and groups:
            groups[-1].append(Line(number, raw))
        else:
            groups.append([Line(number, raw)])
    (head, *rest), *body = groups or [[Line(1, "")]]
    head.expect("program")
    schedule = head.name()
    head.expect("microbatches=")
    num_microbatches = head.integer(1)
    shares = head.sequence(lambda: _share(head)) if head.accept("shares=") else ()
    head.end()
    if rest:
        raise rest[0].fail("a stage, without spaces before it,")
    stages: list[StageProgram] = []
    segments: list[Segment] = []
    crossings: list[Crossing] = []
    ended = False
    for header, *lines in body:
        if ended:
            raise header.fail("nothing after 'end'")
        if header.accept("stage"):
            stages.append(_parse_stage(header, lines))
        elif header.accept("crossing"):
            crossings.append(_parse_crossing(header, lines))
        elif header.accept("segment"):
            segments.append(_parse_segment(header, lines, segments))
        elif header.accept("end"):
            header.end()
            ended = True
        else:
            raise header.fail("stage, segment, crossing or end")
    if not ended:
        last = groups[-1][-1].number
        raise ProgramError(
            f"line {last}: the text of the program does not finish with 'end'", hint="the file may have been cut off"
        )
    return Program(tuple(stages), tuple(segments), schedule, num_microbatches, tuple(crossings), shares)
