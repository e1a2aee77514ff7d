"""Programs as files: what is printed of a plan takes its time and computes its numbers; what is wrong is said."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autopar import api
from autopar.cli import main
from autopar.cluster import PRESETS, cluster_from_dict
from autopar.degrees import Degrees
from autopar.errors import AutoparError, GraphError, JobError, ProgramError
from autopar.ir.text import same_graph
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.program.listing import Listing, Origin, doubts, format_listing, open_listing, parse_listing
from autopar.simulate import simulate
from autopar.task import program_costs, rules_for
from autopar.workload import job_stack, open_workload
from tests.executions import TINY

DP_PP = Degrees(dp=2, pp=2, microbatch=2, global_batch=16)
CASES: dict[str, tuple[str, str, Degrees]] = {
    "data and pipeline": ("gpt2", "train", replace(DP_PP, zero=1)),
    "full recompute": ("bert-base", "train", replace(DP_PP, recompute="full")),
    "tensor": ("llama3-8b", "train", Degrees(tp=2, dp=2, sequence_parallel=True, microbatch=2, global_batch=8)),
    "sharded parameters": ("mlp-xs", "train", Degrees(dp=4, zero=3, microbatch=4, global_batch=16)),
    "interleaved": ("mlp-xs", "train", replace(DP_PP, schedule="interleaved", interleave=2)),
    "zero bubble": ("mlp-xs", "train", replace(DP_PP, schedule="zb-h1")),
    "offload": ("mlp-xs", "train", Degrees(dp=2, offload="optimizer", microbatch=4, global_batch=8)),
    "experts": ("mixtral-8x7b", "train", Degrees(dp=2, ep=2, microbatch=2, global_batch=4)),
    "images": ("vit-b16", "train", Degrees(dp=2, microbatch=2, global_batch=4)),
    "own statistics": ("resnet50", "train", Degrees(dp=2, microbatch=2, global_batch=8)),
    "inference": ("mlp-xs", "infer", Degrees(pp=2, microbatch=2, global_batch=8)),
}
"""Models, modes and degrees that between them have instructions, segments and lines of every sort."""


@pytest.fixture(scope="module")
def planned(cache_dir: Path) -> Callable[[str], Plan]:
    """Return a function that predicts the plan of a case."""

    @cache
    def find(case: str) -> Plan:
        model, mode, degrees = CASES[case]
        workload = open_workload(f"zoo:{model}", mode=mode, dims=TINY[model])
        return Predictor(workload, cache_dir).predict(degrees, PRESETS["h100"]).plan

    return find


@pytest.fixture(scope="module")
def listed(planned: Callable[[str], Plan], cache_dir: Path) -> Callable[[str], Listing]:
    """Return a function that lists the program of a case's plan."""
    return cache(lambda case: api.list_program(planned(case), cache_dir=cache_dir))


@pytest.mark.parametrize("case", CASES)
def test_print_then_parse_is_the_identity(case: str, listed: Callable[[str], Listing]) -> None:
    """Of the program, its graphs and where weights come from; comments are no part of it."""
    listing = listed(case)

    found = parse_listing(format_listing(listing, ["for reading\n only"]))

    assert found.program == listing.program
    assert same_graph(found.graph, listing.graph)
    assert (found.part is None) == (listing.part is None) == (case != "own statistics")
    assert found.part is None or listing.part is None or same_graph(found.part, listing.part)
    assert found.origin == listing.origin


@pytest.mark.parametrize("case", CASES)
def test_the_program_of_a_plan_takes_the_time_of_the_plan(
    case: str, planned: Callable[[str], Plan], cache_dir: Path, tmp_path: Path
) -> None:
    """To the last bit, in every stage, with the memory of the plan."""
    plan, path = planned(case), tmp_path / "program.txt"
    path.write_text(plan.program(cache_dir=cache_dir))

    timeline = api.simulate_program(
        path, cluster=cluster_from_dict(plan.job.cluster), stack=job_stack(plan.job), trace=False
    )

    assert timeline == api.simulate_plan(plan, trace=False, cache_dir=cache_dir)
    assert plan.simulated is not None
    assert timeline.step_seconds == plan.simulated.step_seconds


def text_of(listed: Callable[[str], Listing], case: str = "data and pipeline") -> str:
    return format_listing(listed(case))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("program 1f1b", "programme 1f1b", "line 1: expected"),
        ("microbatches=4", "microbatches=0", "line 1: expected a whole number from 1 on of up to 63 bits at column 27"),
        ("microbatches=4", f"microbatches={10**30}", "line 1: expected a whole number from 1 on"),
        ("microbatches=4", "microbatches=4000000", "4000000 microbatches"),
        ("\nstage 0", "\n  stage 0", "line 2: expected a stage, without spaces before it, at column 3"),
        ("\nstage 0", "\nstag 0", "line 2: expected stage, segment, crossing or end at column 1"),
        ("mesh=(dp: 2/1)", "mesh=(dp: 0/1)", "line 2: expected a whole number from 1 on"),
        ("mesh=(dp: 2/1)", "mesh=(dp: 2/3)", "stage 0 has mesh dp=2, whose strides are not those of a grid"),
        ("devices=0:2", "devices=0:3", "stage 0 has 3 devices and mesh dp=2 of 2"),
        ("resident parameters", "resident activations", "line 3: expected a category of memory that outlives a step"),
        ("resident parameters: ", "resident parameters: -", "line 3: expected a finite number, 0 or above, at column"),
        ("resident parameters: ", "resident parameters: nan //", "line 3: expected a finite number"),
        ("\nend\n", "\nEND\n", "expected stage, segment, crossing or end at column 1"),
        ("\nend\n", "\nend of it\n", "expected the end of the line at column 5"),
        ("\nweights ", "\nweight ", "expected 'weights' or 'graph' at column 1"),
        ("\nweights ", "\nweights zoo:gpt2\nweights ", "expected 'graph' at column 1"),
        ('"hidden": 16', '"hidden": "16"', "expected sizes by name"),
        ("\ngraph ", "\ngraf ", "expected 'graph' at column 1"),
        ('"hidden": 16', '"hidden": \x1b', "expected JSON"),
    ],
)
def test_malformed_text_is_one_error_with_its_line(
    old: str, new: str, message: str, listed: Callable[[str], Listing]
) -> None:
    """And what was expected there."""
    text = text_of(listed)
    assert old in text

    with pytest.raises(ProgramError) as error:
        open_listing(parse_listing(text.replace(old, new, 1)))

    assert message in str(error.value)


def test_lines_of_graphs_are_counted_from_the_beginning_of_the_file(listed: Callable[[str], Listing]) -> None:
    """Comments and blank lines included."""
    text = "// a comment\n\n" + text_of(listed)
    number = next(i for i, line in enumerate(text.split("\n"), 1) if line.startswith("input %input_ids"))

    with pytest.raises(GraphError, match=rf"^line {number}: expected '%'"):
        parse_listing(text.replace("input %input_ids", "input input_ids"))


def test_a_program_without_a_graph_or_with_too_many_is_refused(listed: Callable[[str], Listing]) -> None:
    """With the line at which one was expected, or was not."""
    text = text_of(listed)
    before, graph = text[: text.index("\ngraph ")], text[text.index("\ngraph ") :]
    last = before.count("\n") + 2

    with pytest.raises(ProgramError, match=rf"line {last}: expected a line that starts with 'graph' after 'end'"):
        parse_listing(f"{before}\n")
    with pytest.raises(ProgramError, match="expected the end of the file after two graphs"):
        parse_listing(before + 3 * graph)
    with pytest.raises(ProgramError, match="does not finish with 'end'"):
        parse_listing("program 1f1b microbatches=1\n")
    with pytest.raises(ProgramError, match="line 1: expected 'program'"):
        parse_listing("")


@pytest.mark.parametrize(
    ("pattern", "new", "error", "message"),
    [
        # the graph lies about what its ops make
        (r"%embed: float32\[4,4,16\]", "%embed: float32[4,4,17]", GraphError, "the types of graph"),
        (r"= Add\(%embed.tokens, %embed.positions.weight\)", "= Add(%embed.tokens)", GraphError, "not 2"),
        (r"= Add\(%embed.tokens, ", "= Ad(%embed.tokens, ", GraphError, "op 'embed' (Ad) is unknown at opset"),
        (r"= autopar::GatherGrad\(%", "= autopar::GatherG(%", GraphError, "is none of the functions of domain"),
        (r"\{axis=0\}", '{axis="0"}', GraphError, "has attribute 'axis' of type STRING, not INT"),
        (r"(?m)^graph (.*) opset=\d+", r"graph \1 opset=99", GraphError, "the types of graph"),
        (r"metadata loss_scale = .*", 'metadata loss_scale = "nothing"', GraphError, "no constant of graph"),
        # the program computes something else
        (r"= Add\(embed.tokens, ", "= Sub(embed.tokens, ", ProgramError, "op 'embed' is Sub, and Add in the graph"),
        (r"(?m)^  store embed.positions.*\n", "", ProgramError, "does not store"),
        (r"embed.tokens: \[2, 4, 16\] S\(0\) ", "embed.tokens: [2, 4, 16] S(1) ", ProgramError, "'embed.tokens' is"),
        (r"(?m)^end\n", "segment 9 forward\nend\n", ProgramError, "segment 9 forward belongs to no block"),
    ],
)
def test_what_does_not_compute_its_graph_is_refused(
    pattern: str, new: str, error: type[AutoparError], message: str, listed: Callable[[str], Listing]
) -> None:
    """Whether graph or program is wrong."""
    text, count = re.subn(pattern, new, text_of(listed), count=1)
    assert count == 1

    with pytest.raises(error) as found:
        api.open_program(parse_listing(text))

    assert message in str(found.value)


BY_HAND = """// columns of a product over two devices, and what normalises its AXIS
program forward-only microbatches=2
stage 0 devices=0:2 mesh=(tp: 2/1) blocks=(0) recompute=none
  resident parameters: 48
segment 0 forward
  external x: [8, 6] R 192
  external w: [6, 2] S(1) 48
  h: [8, 2] S(1) 64 = MatMul(x, w) op=h phase=forward block=0
  y: [8, 2] S(1) 64 = Softmax(h) {"axis": AXIS} op=y phase=forward block=0
  export y
  part x x
  part w w
  part y y
end
graph by_hand opset=24
input %x: float32[8,6]
state %w: float32[6,4] parameter
%h: float32[8,4] = MatMul(%x, %w) #0
%y: float32[8,4] = Softmax(%h) {axis=AXIS} #0
output %y
"""


def test_placements_that_no_rule_confirms_are_remarked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not refused: a softmax over the dim that is split is wrong, one over the other dim is not."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    shown = {}
    for axis in (0, 1):
        path = tmp_path / f"axis{axis}.txt"
        path.write_text(BY_HAND.replace("AXIS", str(axis)))
        assert main(["simulate", str(path), "--json"]) == 0
        shown[axis] = json.loads(capsys.readouterr().out)

    texts = {
        axis: [each["text"] for each in found["remarks"] if each["kind"] == "rules"] for axis, found in shown.items()
    }
    assert texts[0] == []
    assert texts[1] == [
        "on axis 'tp' op 'y' runs as S(1) -> S(1), which is no strategy of Softmax: `autopar run` says whether the "
        "numbers are right"
    ]
    assert shown[0]["step_seconds"] == shown[1]["step_seconds"] > 0


def test_the_program_of_the_documentation_is_lawful() -> None:
    """Its step is two microbatches of one product and one collective."""
    page = (Path(__file__).parent.parent / "docs" / "simulation.md").read_text()
    (text,) = (block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "\nprogram " in block)

    program, costs, folded = api.open_program(parse_listing(text))

    (stage,) = simulate(program, costs).stages
    assert doubts(program, folded, rules_for(folded)) == ()
    assert stage.compute_seconds > 0 < stage.collective_seconds


def test_devices_have_to_fill_nodes() -> None:
    """As for a plan."""
    with pytest.raises(JobError, match="12 GPUs do not fill nodes of 8"):
        program_costs(12)


def test_blocks_have_to_be_a_chain() -> None:
    """Numbered without gaps, every op in one."""
    text = BY_HAND.replace("AXIS", "0")

    for changed, shown in ((text.replace("{axis=0} #0", "{axis=0} #2"), "0, 2"), (text.replace(" #0", ""), "-1")):
        with pytest.raises(GraphError, match=f"are in blocks {shown}, not in a chain"):
            open_listing(parse_listing(changed))


def test_the_origin_of_weights_may_have_lists_of_sizes() -> None:
    """Of a model whose configuration has some; a name may hold spaces."""
    lines = 'program 1f1b microbatches=1\nend\n\nweights "a b.onnx" {"blocks": [1, 2], "seq": 4}\ngraph g opset=24\n'

    assert parse_listing(lines).origin == Origin("a b.onnx", (("blocks", (1, 2)), ("seq", 4)))


# The command line.


@pytest.fixture
def folder(planned: Callable[[str], Plan], cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a plan, and the cache of the tests."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(cache_dir))
    monkeypatch.chdir(tmp_path)
    planned("data and pipeline").save(tmp_path / "plan.json")
    return tmp_path


def test_a_printed_program_is_simulated_like_its_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The timeline, the critical path, every device apart, and the trace."""
    more = ["--critical-path", "--flat", "--stragglers", "0.1", "--trace"]
    assert main(["explain", "plan.json", "--program"]) == 0
    text = capsys.readouterr().out
    (folder / "program.txt").write_text(text)

    assert main(["simulate", "plan.json", *more, "plan.trace"]) == 0
    of_plan = capsys.readouterr().out
    assert main(["simulate", "program.txt", "--cluster", "h100", *more, "program.trace"]) == 0
    of_program = capsys.readouterr().out

    assert text.startswith("// dp=2")
    assert "// planned for cluster h100, stack default, precision mixed" in text
    assert of_program == of_plan
    assert (folder / "program.trace").read_text() == (folder / "plan.trace").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate plan.json --cluster v100", "--cluster belongs to the text of a program"),
        ("simulate plan.json --precision fp32", "--precision belongs to the text of a program"),
        ("simulate program.txt --model zoo:gpt2", "--model belongs to a plan"),
        ("run plan.json --ranks 4 --stack default", "--stack belongs to the text of a program"),
        ("explain plan.json --program --pins", "--pins and --program: ask one of them"),
        ("simulate nothing.txt", "cannot read program 'nothing.txt'"),
        ("simulate wrong.txt", "program 'wrong.txt' is not text in UTF-8"),
        ("run program.txt --ranks 2", "the program is for 4 GPUs, not for 2 ranks"),
    ],
)
def test_what_does_not_go_together_is_one_error(
    arguments: str, message: str, folder: Path, listed: Callable[[str], Listing], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "program.txt").write_text(text_of(listed))
    (folder / "wrong.txt").write_bytes(b"\xff\xfe")

    code = main(arguments.split())

    assert code == 2
    assert message in capsys.readouterr().err
