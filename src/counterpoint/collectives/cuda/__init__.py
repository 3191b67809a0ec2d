"""Run calls on GPUs; other packages use only `transport.py` and `device.py`.

- `transport.py` puts the parts together; `queues.py` issues the calls of a channel, and messages.
- `call.py`: a prepared call, its `Work`, in partitions or not, and what all parts of a communicator share.
- `lower.py`: driver calls as data. `driver.py`: streams and events, and how driver calls are issued.
- `device.py`: the GPU. `regions.py`: its symmetric memory and flags. `watch.py`: the thread that ends stuck calls.
- `sums.py`: how many SMs a sum kernel gets (`launch_of`), and its launch. `sum_kernel.py`: the Triton kernel.
- `order.py`: when freed symmetric memory may be reused while streams or peers still use it (`StreamOrder.freed`).
"""
