"""Experts of transformers' mixtures, exported as the planner's ops: dispatch, grouped products, combination.

What a module computes with experts depends on data: PyTorch's exporter traces none of its loops, and a form that can be
traced copies a matrix of weights for every token. Modules of transformers that are decorated with
`use_experts_implementation` ask an interface how to run; here they run as ops of domain `autopar`, whose order of
dims is [experts, samples, positions, width]. Tokens are one sample: modules flatten them before they come to experts.

Dims: E experts, T tokens, K choices of a token, d model width, f width of an expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from autopar.errors import ModelError

_IMPLEMENTATION = "autopar"
_FIELDS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
"""What the decorator, and the module, say of experts."""


def experts_of(module: Any) -> list[Any]:
    """Return the parts of a module that are experts by transformers' interface.

    Args:
        module: A `torch.nn.Module`.
    """
    return [part for part in module.modules() if all(hasattr(part, name) for name in _FIELDS)]


def exports_experts(model_type: str) -> bool:
    """Whether transformers is installed and has experts of a `model_type` run by its interface."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        return False
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    if model_type not in CONFIG_MAPPING:
        return False
    name = model_type_to_module_name(model_type)
    place = f"transformers.models.{name}.modeling_{name}"
    if find_spec(place) is None:
        return False
    return any(isinstance(item, type) and hasattr(item, "_apply_gate") for item in vars(import_module(place)).values())


@contextmanager
def experts_as_ops(module: Any) -> Iterator[None]:
    """Have the experts of a module run as ops of domain `autopar` while it is exported.

    Args:
        module: A copy of the module, whose configurations are its own.

    Raises:
        ModelError: If experts have a norm behind them, which the ops have no form for.
    """
    experts = experts_of(module)
    if not experts or find_spec("transformers") is None:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for part in experts:
        if getattr(part, "has_post_expert_norm", False):
            raise ModelError(
                f"experts of {type(part).__name__} have a norm behind them, which grouped products have not",
                hint="plan a model of the zoo with experts, such as zoo:mixtral-8x7b",
            )
        part.config._experts_implementation = _IMPLEMENTATION
    ALL_EXPERTS_FUNCTIONS[_IMPLEMENTATION] = _forward
    try:
        yield
    finally:
        del ALL_EXPERTS_FUNCTIONS[_IMPLEMENTATION]


def _forward(part: Any, x_Td: Any, expert_TK: Any, weight_TK: Any) -> Any:
    """Return what experts make of tokens, as `part.forward` does."""
    import torch

    count, (tokens, hidden), chosen = part.num_experts, x_Td.shape, expert_TK.shape[1]
    fill = {"fill": min(1.0, chosen / count)}
    numbers = torch.arange(count)

    def op(kind: str, inputs: list[Any], shape: tuple[int, ...]) -> Any:
        return torch.onnx.ops.symbolic(f"autopar::{kind}", inputs, fill, dtype=inputs[0].dtype, shape=shape, version=1)

    def product(rows: Any, weight: Any, bias: str) -> Any:
        matrices = weight if part.is_transposed else weight.transpose(1, 2)
        y = op("GroupedMatMul", [rows, matrices], (count, 1, tokens, matrices.shape[2]))
        return y + getattr(part, bias)[:, None, None, :] if part.has_bias else y

    expert = expert_TK.unsqueeze(0)
    rows = op("ExpertDispatch", [x_Td.unsqueeze(0), expert, numbers], (count, 1, tokens, hidden))
    if part.has_gate:
        inner = part._apply_gate(product(rows, part.gate_up_proj, "gate_up_proj_bias"))
    else:
        inner = part.act_fn(product(rows, part.up_proj, "up_proj_bias"))
    made = product(inner, part.down_proj, "down_proj_bias")
    weight = weight_TK.to(made.dtype).unsqueeze(0)
    return op("ExpertCombine", [made, weight, expert, numbers], (1, tokens, hidden)).squeeze(0)
