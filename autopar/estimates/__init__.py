"""Thousands of plans by degrees of one model, by formula from tables that they share."""

from autopar.estimates.estimator import Estimates, Estimator

__all__ = ["Estimates", "Estimator"]
