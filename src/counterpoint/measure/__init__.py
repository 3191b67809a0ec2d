"""Run a computation and a collective alone, one after the other and together; say what each lost and why."""
