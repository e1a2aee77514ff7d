"""Exact reductions of a selection problem, each with a map from a reduced choice back to a choice of the original."""
