"""A model as a chain of blocks: one copy of every distinct block, and what is known of a block whatever the mesh."""
