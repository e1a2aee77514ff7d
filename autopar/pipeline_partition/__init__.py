"""Partitioning of the chain of blocks into pipeline stages, with recompute per block: exact and heuristic."""
