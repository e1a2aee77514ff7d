"""Small jobs that questions about sizes are asked of; each solves many plans, so that these models have few blocks."""

from functools import cache
from typing import Any

from autopar.request import JobRequest
from autopar.sizing.planning import find_plan
from autopar.task import Effort, Task, prepare
from tests.formulations import DIMS

SHORT = DIMS | {"mlp-xs": {"num_layers": 2, "hidden": 16}}
MLP: dict[str, Any] = {"global_batch": 8, "dims": SHORT["mlp-xs"]}
LONG = MLP | {"dims": DIMS["mlp-xs"]}
GPT: dict[str, Any] = {"global_batch": 16, "dims": DIMS["gpt2"]}


@cache
def short_task(name: str, gpus: int, memory: float | None = None) -> Task:
    """Return a job of a model with few blocks."""
    return prepare(JobRequest(f"zoo:{name}", gpus=gpus, global_batch=8, dims=SHORT[name], memory_limit=memory))


def fits(task: Task) -> bool:
    """Whether a plan is found."""
    return find_plan(task, Effort(top_k=1)).plan is not None
