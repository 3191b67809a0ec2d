"""From the arguments of a call to a submission, which a transport carries out; nothing here is for users.

- `tensors.py`: what a call sees of its tensors. `request.py`: one function for each operation checks them and describes
  the call. `submission.py`: that description, and what a kind of device has to offer; `cpu/` and `cuda/` implement it.
- `submitter.py`: numbers and starts calls, and looks up what comes again. `fallback.py`: small calls that torch takes.
"""
