"""The chain of blocks cut into pipeline stages: dynamic programs over cuts, with recompute per block."""
