"""Run the collectives of torch's FSDP2, DDP, tensor and expert parallelism without SMs, by copy engines.

- `overlap.py`: `overlap(model)`, for FSDP2 (`fsdp/`), DDP (`ddp.py`), tensor and expert parallelism (below).
- `tensor/`: matmuls of tensor parallelism, `torch.ops.counterpoint`.
- `expert/`: tokens of expert parallelism on their way to the experts and back.
- `follow_tuning.py`: reads what `counterpoint tune` chose, equally on all ranks, for all of them.
- `backend/`: a backend of torch.distributed, for everything else.
- `group.py`: the communicator that all users of the same ranks share, and what decides about their calls.
- `options.py`: the options of all of them; `report.py`: which modules and calls run how, and why.
- `background.py`: the thread that launches reductions of gradient buckets.
- `call_memory.py`: symmetric memory of single calls; `sums.py`: adds up what the ranks sent.
- `torch_calls.py`: what torch gives to its process groups and to FSDP2's hooks, and what it gets from them.
"""
