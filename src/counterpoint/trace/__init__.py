"""Read the trace of every rank, Kineto JSON or an Nsight Systems export, into columns.

timeline.py has the columns that every reader makes, source.py finds and opens files. kineto.py reads Kineto JSON (cut
into events by chunks.py, decoded by kineto_columns.py). nsys.py reads Nsight exports (tables and ranks, and NVTX
ranges, in nsys_*.py). flight_recorder.py reads dumps of NCCL's flight recorder, nccl_log.py NCCL's logs. classify.py
says which operations are communication, clocks.py puts all ranks on one clock. Other packages do not use
kineto_columns.py and nsys_*.py.
"""
