"""Run FSDP2's collectives through a `Communicator`; users call `counterpoint.parallel.overlap`.

- `module_choice.py`: puts our hooks on modules, by the choices of a tuning, and takes them off.
- `hooks.py`: torch's two hooks, the communicators of all groups, and which modules are gathered ahead.
- `placeholders.py`: tensors without memory that FSDP2 takes for its buffers.
- `slots.py`: symmetric memory of unsharded parameters, and which modules share it.
- `modules.py`: everything that looks inside FSDP2.
"""
