"""Data structures of a selection problem: the graphical model, its memory rows, compressed arrays, table kernels."""
