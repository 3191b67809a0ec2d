"""Run a script with many ranks on one GPU, or on CPUs, to see values and order before GPUs are booked."""
