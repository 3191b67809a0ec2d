"""A line for the user: zero-SM collectives under torch's own ways to train in parallel."""
