"""Prints questions.md: the questions people ask most, our plan beside the one that experts run.

    python docs/benchmarks/questions.py > docs/benchmarks/questions.md
    python docs/benchmarks/questions.py llama3-70b          one of them
    python docs/benchmarks/questions.py --time-limit 120

Each job is solved with the default stack of its cluster, and the plan that practitioners published is predicted with
the same costs. Measured seconds are of the source that is named.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import autopar
from autopar.bench.conditions import conditions
from autopar.bench.report import condition_lines, markdown_table
from autopar.degrees import Degrees
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Question:
    """A job, and how experts run it.

    Attributes:
        asked: The question.
        model: Name in the zoo.
        cluster: Preset.
        experts: Published plans by what they are called.
        source: Where these are published.
        measured: Measured seconds of a step of the first of them; None if none was.
        precision: Precision of the job.
        dims: Settings of the model.
    """

    asked: str
    model: str
    cluster: str
    experts: Mapping[str, Degrees]
    source: str
    measured: float | None = None
    precision: str = "bf16,gradients=16,reduce=16"
    dims: Mapping[str, int] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """Devices of the job."""
        return next(iter(self.experts.values())).gpus

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return next(iter(self.experts.values())).global_batch


QUESTIONS = {
    "llama3-70b": Question(
        "How do I train Llama-3-70B on 64 H100?",
        "llama3-70b",
        "h100",
        {"tp4 pp4 cp2, 5 stages a group": Degrees(
            dp=2, tp=4, pp=4, cp=2, zero=1, sequence_parallel=True, interleave=5, microbatch=1, global_batch=128,
        )},
        "NVIDIA/dgxc-benchmarking v24.11.1, llama3.1/README_70b.md",
        14.72,
        dims={"seq": 8192},
    ),
    "qwen3-30b-a3b": Question(
        "Qwen3-30B-A3B on 8 B200: FSDP or expert parallelism?",
        "qwen3-30b-a3b",
        "b200",
        {
            "fsdp": Degrees(dp=8, zero=3, recompute="selective", microbatch=8, global_batch=64),
            "ep4 pp2": Degrees(dp=4, ep=4, pp=2, zero=1, microbatch=1, global_batch=64),
        },
        "mlc-ai/pith-train issue 79: FSDP 19.4 to 19.5 thousand tokens/s a device, EP4 PP2 17.5 thousand",
        64 * 8192 / (8 * 19450),
        dims={"seq": 8192},
    ),
    "deepseek-v3": Question(
        "DeepSeek-V3 on 1,024 H100?",
        "deepseek-v3",
        "h100",
        {"tp2 pp8 ep64, 4 stages a group": Degrees(
            dp=64, tp=2, pp=8, ep=64, etp=1, zero=1, sequence_parallel=True, recompute="selective", interleave=4,
            microbatch=1, global_batch=16384,
        )},
        "NVIDIA-NeMo/Megatron-Bridge examples/model_verification_cards",
        61.756,
        dims={"seq": 4096},
    ),
    "llama3.1-405b": Question(
        "Llama-3.1-405B on 512 H100 in fp8?",
        "llama3.1-405b",
        "h100",
        {"tp8 pp8 cp2, 8 stages a group": Degrees(
            dp=4, tp=8, pp=8, cp=2, zero=1, sequence_parallel=True, interleave=8, microbatch=1, global_batch=256,
        )},
        "NVIDIA/dgxc-benchmarking v25.04.02, llama3.1/README.md (the plan; measured in bf16 only: 19.8 s)",
        precision="fp8,weights=low,gradients=16,reduce=16",
        dims={"seq": 8192},
    ),
}  # fmt: skip


def say(line: str = "") -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def row(name: str, plan: Plan) -> tuple[str, ...]:
    """Return the row of a plan."""
    found = plan.simulated
    assert found is not None, "plans are simulated"
    band = "not calibrated" if found.error is None else f"± {100 * found.error:.1f} %"
    peak = max(stage.peak for stage in found.stages)
    return name, format_seconds(found.step_seconds), band, f"{100 * found.mfu:.1f} %", format_bytes(peak), plan.summary


def answer(question: Question, seconds: float) -> None:
    """Print our plan and those of experts."""
    say(f"## {question.asked}")
    say()
    common = {"cluster": question.cluster, "precision": question.precision, "dims": dict(question.dims)}
    model = f"zoo:{question.model}"
    plan = autopar.solve(
        model, gpus=question.gpus, global_batch=question.batch, time_limit=seconds, workers=2, **common
    )
    rows = [row("ours", plan)]
    for name, degrees in question.experts.items():
        try:
            rows.append(row(name, autopar.predict(model, degrees, **common).plan))
        except AutoparError as error:
            rows.append((name, str(error), "", "", "", ""))
    for line in markdown_table(("plan", "step", "band", "MFU", "peak", "summary"), rows):
        say(line)
    say()
    assert plan.search is not None, "it was searched"
    say(f"No plan of the declared space is faster than {format_seconds(plan.search.bound)} by the planner's formula.")
    if question.measured is not None:
        say(f"Measured, the first of the published plans: {format_seconds(question.measured)}.")
    say(f"Published plans: {question.source}.")
    assert plan.simulated is not None, "plans are simulated"
    for remark in plan.simulated.remarks:
        say(f"Note: {remark.text}.")
    say()


def main() -> None:
    """Answer the questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *QUESTIONS], metavar="NAME", help=", ".join(QUESTIONS))
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="seconds for each plan")
    asked = parser.parse_args()
    say("# The questions people ask most")
    say()
    say("`python docs/benchmarks/questions.py` prints this page.")
    say()
    for line in condition_lines(conditions("python docs/benchmarks/questions.py")):
        say(line)
    say()
    for name in asked.names or QUESTIONS:
        answer(QUESTIONS[name], asked.time_limit)


if __name__ == "__main__":
    main()
