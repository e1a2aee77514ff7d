"""A plan in the words of the field: what each mesh axis does, one line for a plan, what tells two plans apart."""
