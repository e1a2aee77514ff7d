"""What travels and runs together: gradients in buckets, found for one program at a time."""

from autopar.fusion.buckets import Bucketing, cut_gradients
from autopar.fusion.compare import Comparison, compare

__all__ = ["Bucketing", "Comparison", "compare", "cut_gradients"]
