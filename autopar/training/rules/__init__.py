"""VJP rules by subject. A rule writes the ops that turn the gradients of an op's outputs into those of its inputs."""
