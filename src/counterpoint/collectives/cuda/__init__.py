"""Run calls on GPUs; other packages use only `transport.py` and `device.py`.

- `transport.py` puts the parts together, and its thread `Watch` ends stuck calls.
- `queues.py` issues the calls of a channel, and messages.
- `call.py`: a prepared call, its `Work`, in partitions or not, and what all parts of a communicator share.
- `lower.py`: driver calls as data. `driver.py`: streams and events, and how driver calls are issued.
- `memory_reuse.py`: when freed symmetric memory may be used again.
- `device.py`: the GPU. `peer_access.py`: whether ranks can share memory.
- `regions.py`: symmetric memory and flags.
- `sum_launch.py`: how many SMs a sum kernel gets (`launch_of`), and its launch. `sum_kernel.py`: the Triton kernel.
"""
