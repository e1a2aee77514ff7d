"""A plan in the field's words: roles of its mesh axes, a one-line summary, the parts of its step, its signature."""
