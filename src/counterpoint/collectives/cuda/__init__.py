"""Run calls on GPUs; other packages use only `transport.py` and `device.py`.

- `transport.py` puts the parts together; `context.py` holds what they share; `channel.py` issues one channel's calls.
- `partitioned.py`: a call whose caller works piece by piece.
- `call.py`: a prepared call and its `Work`. `lower.py`: driver calls as data. `driver.py`: issues them.
- `device.py`, `memory.py`: the GPU, its symmetric memory and flags. `watch.py`: the thread that ends stuck calls.
- `sums.py`: how many SMs a sum kernel gets (`launch_of`), and its launch. `sum_kernel.py`: the Triton kernel.
- `events.py`: when freed symmetric memory may be reused while streams or peers still use it (`StreamOrder.freed`).
"""
