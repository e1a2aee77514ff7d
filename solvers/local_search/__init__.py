"""Primal heuristics: choices within the limits by construction, local search, large-neighbourhood search, baselines."""
