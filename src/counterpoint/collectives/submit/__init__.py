"""Turn the arguments of a call into a `Submission`, which a transport runs; nothing here is for users.

- `tensors.py` checks and names the tensors of a call. `request.py` has a function for each operation that makes the
  submission, `partitioned.py` those of calls in partitions. `submission.py` defines it, and the `Transport` protocol
  that `cpu/` and `cuda/` implement.
- `submitter.py` numbers, caches and starts calls.
"""
