"""What alternatives to the decisions of a plan cost: solved again with one of them pinned to another value."""

from autopar.alternatives.records import Alternative, Limit, Weighing
from autopar.alternatives.tensor import TensorView, view_tensor
from autopar.alternatives.weigh import weigh

__all__ = ["Alternative", "Limit", "TensorView", "Weighing", "view_tensor", "weigh"]
