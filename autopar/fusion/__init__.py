"""What travels and runs together: gradients in buckets, ops in kernels, found for one program at a time."""

from autopar.fusion.buckets import LEAST_GAIN, Bucketing, cut_gradients
from autopar.fusion.compare import Comparison, compare
from autopar.fusion.joint import Joint, fuse_jointly
from autopar.fusion.ops import OpSearch

__all__ = ["LEAST_GAIN", "Bucketing", "Comparison", "Joint", "OpSearch", "compare", "cut_gradients", "fuse_jointly"]
