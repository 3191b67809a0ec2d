"""Find out from the traces of one job where the time of a step goes, what waits or slows down, and why.

`counterpoint.diagnose` is api.py. engine.py reads ranks and digests them (digest.py: steps, gaps, comm_rows, FLOPs),
job.py joins them (join.py) on one clock. accounts.py says where the time went; kernels.py, launch_order.py,
stragglers.py, idle.py, copies.py, gpus.py and imbalance.py why; replay.py what each cause is worth (zero_sm.py: and
the remedy); findings.py ranks them, advice.py says what to change. frames.py turns it into tables, gate.py checks it
in CI. digest_file.py sends digests from host to host. hang.py finds which ranks are missing in
flight-recorder dumps. Other packages use `api.diagnose`, `Result` and gate.py.
"""
