"""Folding: a model as a chain of blocks, one representative per distinct block, and its mesh-independent properties."""
