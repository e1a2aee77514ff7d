"""Branch and bound over configurations: pipeline degree, mesh, microbatches and schedule; its tasks and executors."""
