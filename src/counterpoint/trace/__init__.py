"""Traces of every rank, read into columns: Kineto JSON and Nsight Systems exports; what is communication; one clock."""
