"""Share a GPU between computation and communication by knobs, each of which verifies that it took effect.

control.py says what a knob is, parse.py makes knobs from a mechanism's name, and observe.py looks at what ran; its
`verified` applies knobs and raises where one did nothing. The knobs are gemm_sms.py, streams.py, launch_order.py,
nccl.py and occupancy.py, which works by occupancy_shape.py and launch_hooks.py.
"""
