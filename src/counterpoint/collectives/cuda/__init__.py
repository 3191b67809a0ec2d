"""Carries calls out on GPUs; only `transport.py` is used from outside.

- `transport.py` puts the parts together; `context.py` is what they share; `channel.py` issues the calls of one channel.
- `call.py`: a prepared call and its work. `lower.py`: driver calls as data. `driver.py`: how they are issued.
- `device.py`, `memory.py`, `events.py`: the GPU, its symmetric memory and flags, the order of its streams.
- `watch.py`: the thread that ends what does not end. `reduce.py`, `sum_kernel.py`: sums by a Triton kernel.
"""
