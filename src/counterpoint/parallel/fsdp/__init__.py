"""FSDP2 through a `Communicator`; what a user calls is in `counterpoint.parallel.overlap`.

- `hooks.py`: torch's two hooks, and the communicators of all groups.
- `placeholders.py`: tensors without memory that FSDP2 takes for its buffers.
- `slots.py`: symmetric memory of whole parameters, and which modules share it.
- `modules.py`: everything that looks inside FSDP2.
- `prefetch.py`: which modules are gathered ahead. `report.py`: what was replaced and moved.
"""
