"""autopar: an ONNX model and a cluster in, a verified parallelisation plan out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import fuse_plan, rules, simulate_plan, simulate_program, solve
    from autopar.cluster import Cluster
    from autopar.degrees import Degrees
    from autopar.display import show_progress
    from autopar.frameworks import export
    from autopar.ir.graph import Graph
    from autopar.jaxprs import from_jax
    from autopar.partitioning import partition
    from autopar.pins import Choices, Pins
    from autopar.plan import Plan
    from autopar.prediction import predict
    from autopar.request import JobRequest
    from autopar.scenarios import whatif
    from autopar.sizing.gpus import find_gpus
    from autopar.torch_export import from_torch

__version__ = "0.2.0"
__all__ = [
    "Choices",
    "Cluster",
    "Degrees",
    "Graph",
    "JobRequest",
    "Pins",
    "Plan",
    "__version__",
    "export",
    "find_gpus",
    "from_jax",
    "from_torch",
    "fuse_plan",
    "partition",
    "predict",
    "rules",
    "show_progress",
    "simulate_plan",
    "simulate_program",
    "solve",
    "whatif",
]

# Names are loaded when they are first used, so that `import autopar` stays light.
_HOMES = {
    "solve": "autopar.api",
    "fuse_plan": "autopar.api",
    "simulate_plan": "autopar.api",
    "simulate_program": "autopar.api",
    "rules": "autopar.api",
    "partition": "autopar.partitioning",
    "predict": "autopar.prediction",
    "export": "autopar.frameworks",
    "show_progress": "autopar.display",
    "from_jax": "autopar.jaxprs",
    "from_torch": "autopar.torch_export",
    "Degrees": "autopar.degrees",
    "find_gpus": "autopar.sizing.gpus",
    "Graph": "autopar.ir.graph",
    "JobRequest": "autopar.request",
    "Choices": "autopar.pins",
    "Cluster": "autopar.cluster",
    "Pins": "autopar.pins",
    "Plan": "autopar.plan",
    "whatif": "autopar.scenarios",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, those that are not loaded yet included."""
    return __all__
