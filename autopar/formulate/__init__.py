"""Strategies, prices and memory of a graph on a mesh as the arrays of a problem."""
