"""Implement a backend of torch.distributed; users import `counterpoint.torch_backend`, which registers it.

- `registration.py`: registers the backend's name with torch; loads the rest when a group is made.
- `group.py`: the process group: which calls a `Communicator` takes, and that all others go to torch's own backends.
- `hosts.py`: the communicator of a group over several hosts, and which calls it takes.
- `inner.py`: the group of torch's own backends inside of it.
- `messages.py`: messages between two ranks, through mailboxes.
- `symmetric.py`: tensors of unmodified code where peers can write them.
"""

NAME = "counterpoint"
