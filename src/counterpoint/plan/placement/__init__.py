"""Find which rank of a job should run on which host, and write it as launchers read it.

topology.py                hosts below a tree of switches, or below measured distances
read_topology.py           reads a file of any kind; those of Slurm by read_slurm.py
traffic.py                 the bytes that ranks exchange in a step
place.py                   what an order costs, and the search: partition.py finds orders, swaps.py improves them
launch_files.py            rankfile, hostfile, SLURM_HOSTFILE, DeviceMesh

`plan/answer.py` calls all of it. It needs the extra `plan` (scipy, PyYAML).
"""

from importlib.util import find_spec

from counterpoint.errors import Unsupported

for package, module in (("scipy", "scipy"), ("PyYAML", "yaml")):
    if find_spec(module) is None:
        raise Unsupported(f"placement needs {package}, which is not installed: pip install 'counterpoint[plan]'")
