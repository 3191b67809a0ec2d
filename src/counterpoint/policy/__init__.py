"""Choose for a pair of operations: how many SMs for whom, and which mechanism."""
