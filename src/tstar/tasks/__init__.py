"""Built-in tasks: generated, verifiable, graded by levels, nothing to download."""
