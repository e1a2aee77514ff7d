"""Exact solvers of the staging problem (`autopar.staging`): pipeline stages, their devices and options."""
