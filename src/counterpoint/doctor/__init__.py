"""Read a machine's GPUs, links and software, and report what prevents overlap, what it means and how to mend it.

checkup.py collects the readings and runs all checks on them. probe.py runs read_gpus.py (NVML, CUDA, rates of copies)
and system.py (torch, NCCL) in child processes; system.py also reads /sys. check_gpus.py, check_links.py and
check_software.py are functions of `Readings`; readings.py defines these records, and makes the records of checks.
"""
