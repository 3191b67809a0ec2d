"""Be a backend of torch.distributed; users import `counterpoint.torch_backend`, which registers it.

- `registration.py`: tells torch the name; loads the rest when a group is made.
- `group.py`: the process group: which calls a `Communicator` takes, and that all others go to torch's own backends.
- `hosts.py`: the communicator of a group over several hosts, and which calls it takes.
- `inner.py`: the group of torch's own backends inside of it.
- `messages.py`: messages between two ranks, through mailboxes.
- `work.py`: torch's `Work` of the calls that a communicator took.
- `symmetric.py`: tensors of unmodified code where peers can write them.
- `report.py`: which calls went which way, and why.
"""

NAME = "counterpoint"
