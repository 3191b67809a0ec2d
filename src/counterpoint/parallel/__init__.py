"""Put zero-SM collectives under torch's own parallelism.

- `overlap.py`: the one line for FSDP2 (`fsdp/`), DDP (`ddp.py`) and tensor parallelism (`tensor/`).
- `tensor/`: matmuls of tensor parallelism, `torch.ops.counterpoint`.
- `backend/`: a backend of torch.distributed, for everything else.
- `background.py`: the thread that launches reductions of gradient buckets.
- `arguments.py`: the arguments that torch gives to both.
- `tables.py`: aligns the rows of reports.
"""
