"""Find which rank of a job should run on which host, and write it as launchers read it.

topology.py                hosts below a tree of switches, or below measured distances
read_topology.py           reads a file of any kind, by read_slurm.py, read_yaml.py and read_matrix.py
traffic.py, cost.py        the bytes that ranks exchange in a step, and what they cost in an order
place.py                   the search: mesh.py and partition.py find orders, swaps.py improves them
launch_files.py            rankfile, hostfile, SLURM_HOSTFILE, DeviceMesh

`plan/answer.py` calls all of it. It needs the extra `plan` (scipy, PyYAML).
"""

from importlib.util import find_spec

from counterpoint.errors import Unsupported

for package, module in (("scipy", "scipy"), ("PyYAML", "yaml")):
    if find_spec(module) is None:
        raise Unsupported(f"placement needs {package}, which is not installed: pip install 'counterpoint[plan]'")
