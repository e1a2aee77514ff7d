"""How large a job has to be: why nothing fits and what would, and how many GPUs a goal takes."""
