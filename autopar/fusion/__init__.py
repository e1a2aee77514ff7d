"""What travels and runs together: gradients in buckets, found for one program at a time."""

from autopar.fusion.buckets import Bucketing, cut_gradients

__all__ = ["Bucketing", "cut_gradients"]
