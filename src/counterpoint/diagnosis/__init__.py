"""Find out from the traces of one job where the time of a step goes, what waits or slows down, and why.

`counterpoint.diagnose` is api.py. engine.py reads ranks and digests them (digest.py: steps, gaps, comm_rows, FLOPs),
job.py joins them (join.py) on one clock. accounts.py says where the time went, kernels.py, launch_order.py and
stragglers.py why, replay.py what each cause is worth, findings.py what to change. frames.py turns it into tables,
gate.py checks it in CI. digest_file.py sends digests from host to host. hang.py finds which ranks are missing in
flight-recorder dumps. Other packages use `api.diagnose`, `Result` and gate.py.
"""
