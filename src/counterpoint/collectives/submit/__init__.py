"""Turn the arguments of a call into a `Submission`, which a transport runs; nothing here is for users.

- `tensors.py` checks and names the tensors of a call. `request.py` makes the submission: by the row of a collective of
  even blocks, or by a function for each other kind of call. `submission.py` defines it, and the `Transport` protocol
  that `cpu/` and `cuda/` implement.
- `submitter.py` numbers, caches and starts calls.
"""
