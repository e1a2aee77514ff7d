"""The forms that solvers work on: graphical models, flat arrays, memory limits as rows, families of problems."""
