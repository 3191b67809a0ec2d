"""Share a GPU between computation and communication by controls, which verify that they took effect.

control.py defines a control, parse.py makes controls from a mechanism's name, and observe.py sees what ran; its
`verified` applies controls and raises if one did nothing. The controls are in gemm_sms.py, priority.py,
green_contexts.py, launch_order.py, nccl.py and occupancy.py, which changes launches by launch_hooks.py.
"""
