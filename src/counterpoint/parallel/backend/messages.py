"""Send and receive between two ranks of a group through mailboxes, opened at the first message between them.

Each pair of ranks that exchanges messages has a communicator of its own, with nothing in it but mailboxes. So a group
that sends no messages pays nothing, and memory goes to the pairs that do.

*How a pair meets.* Both ranks of a pair make a call for each message between them, so both come to open it, each at
its own first one: there a rank waits for the other on the host, as NCCL's groups do. Unlike there, a rank that waits
serves others: in a ring in which all send first, everybody waits for the next rank while the one before wants it. The
group's store has a word for each rank: `away` (it is not waiting), `free` (it is), or the token of the pair that it is
opening. Who waits for a peer tries to put one token in both words, each only in place of `free`, and takes the first
back if the second is not to be had. Both ranks see the token in both words, and make the communicator. Nobody holds a
word while waiting for another one, and whoever waits can be taken by any pair: so some pair can always go on, unless a
rank makes no call at all. Before a rank goes on, it puts `away` in place of `free`, and so leaves nobody in the middle.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.work import Work
from counterpoint.errors import Misconfigured, PeerTimeout, Unsupported
from counterpoint.parallel.backend.inner import InnerGroup

c10d: Any = _distributed_c10d  # its stubs lack half of it
_AWAY, _FREE = "away", "free"
_PAUSE_S = 1e-3


class MessagePair:
    """Exchanges messages with one other rank, on streams of their own behind the current one."""

    def __init__(self, group: InnerGroup, communicator: Communicator) -> None:
        self._group, self._communicator = group, communicator
        self._peer = 1 - communicator.rank

    def send(self, tensor: Tensor) -> Work | None:
        """Start a send, which begins before the receive is posted."""
        return self._communicator.send(tensor, self._peer, async_op=True)

    def recv(self, tensor: Tensor) -> Work | None:
        """Start a receive."""
        return self._communicator.recv(tensor, self._peer, async_op=True)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds a rank waits for the other, from now on."""
        self._communicator.set_timeout(timeout_s)

    def end(self, how: Literal["close", "abort"]) -> None:
        """Close the communicator, which waits for messages under way, or abort it."""
        getattr(self._communicator, how)()
        self._group.unregister()


class MessagePairs:
    """Holds the pairs of one rank of a group.

    Args:
        options: what torch handed to the backend: store, rank, size, timeout and ranks.
        mailbox_bytes: room for messages in each direction; None: none, and torch takes all messages.
        timeout_s: seconds that a rank waits for another.
        ranks_per_host: so many consecutive ranks count as a host; None: those of one machine do.
    """

    device_type = "cuda"  # of tensors that go through mailboxes

    def __init__(
        self, options: Any, mailbox_bytes: int | None, timeout_s: float, ranks_per_host: int | None = None
    ) -> None:
        self._made_from, self._rank, self._ranks_per_host = options, options.group_rank, ranks_per_host or 1 << 30
        self._store = c10d.PrefixStore("pairs/", options.store)
        self._options = CommunicatorOptions(channels=1, mailbox_bytes=mailbox_bytes, timeout_s=timeout_s)
        self._known: dict[int, MessagePair | str] = {}
        self._decides = f"mailbox_bytes={mailbox_bytes}, ranks_per_host={ranks_per_host}"
        self._store.set(_options_of(self._rank), self._decides)
        self._agreed = set[int]()
        self._lock = threading.Lock()  # one thread at a time opens pairs

    def why_torch(self, peer: int, tensor: Tensor, tag: int) -> str | None:
        """Return why torch takes a message, the same on both ranks; None if the two may have mailboxes."""
        if tensor.device.type != self.device_type:
            return f"tensors on {tensor.device.type}"
        if peer not in self._agreed:
            self._agree(peer)
        if self._options.mailbox_bytes is None:
            return "mailbox_bytes is None"
        if peer == self._rank:
            return "to itself"
        if peer // self._ranks_per_host != self._rank // self._ranks_per_host:
            return "on another host"
        return "a tag" if tag else None

    def _agree(self, peer: int) -> None:
        """Raise Misconfigured, on both ranks, if the options of `peer` that decide are others than those here."""
        theirs = self._store.get(_options_of(peer)).decode()
        if theirs != self._decides:
            raise Misconfigured(
                f"messages of ranks {self._rank} and {peer}: {self._decides} on rank {self._rank}, {theirs} on rank "
                f"{peer}; give all ranks the same"
            )
        self._agreed.add(peer)

    def with_rank(self, peer: int, device: torch.device) -> MessagePair | str:
        """Return the pair of this rank and `peer`, opened at the first call, or why they cannot have mailboxes."""
        found = self._known.get(peer)
        if found is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise Misconfigured(
                    f"the first message with rank {peer} in a graph capture, where no memory can be made; send or "
                    "receive one before"
                )
            with self._lock:
                self._open(peer, device)
            found = self._known[peer]
        return found

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds a rank waits for another, from now on."""
        self._options = replace(self._options, timeout_s=timeout_s)
        for pair in self._known.values():
            if isinstance(pair, MessagePair):
                pair.set_timeout(timeout_s)

    def end(self, how: Literal["close", "abort"]) -> None:
        """Close or abort all communicators."""
        while self._known:
            pair = self._known.popitem()[1]
            if isinstance(pair, MessagePair):
                pair.end(how)

    def _open(self, peer: int, device: torch.device) -> None:
        """Wait until the pair with `peer` is open; meanwhile open those that others want with this rank."""
        mine, deadline = self._word(self._rank), time.monotonic() + self._options.timeout_s
        self._store.set(mine, _FREE)
        try:
            while True:
                token = self._store.get(mine).decode()
                if token == _FREE and peer not in self._known:
                    token = self._claimed(peer)
                if token != _FREE and self._is_whole(token):
                    self._meet(_ranks_of(token), device)
                    self._store.set(mine, _FREE)
                elif token == _FREE and peer in self._known:
                    if self._store.compare_set(mine, _FREE, _AWAY).decode() == _AWAY:
                        return
                elif time.monotonic() > deadline:
                    raise PeerTimeout(
                        f"rank {peer} sent nothing to rank {self._rank} and received nothing from it within "
                        f"{self._options.timeout_s:g} s; it has to, as the first message of two ranks makes memory",
                        ranks=(peer,),
                    )
                else:
                    time.sleep(_PAUSE_S * (1 + random.random()))  # not all try at once again
        except BaseException:
            self._store.set(mine, _AWAY)
            raise

    def _claimed(self, peer: int) -> str:
        """Return the token of the pair with `peer` if it could be put in both words, else `free`."""
        low, high = sorted((self._rank, peer))
        token = f"{low}-{high} by {self._rank}"
        if self._store.compare_set(self._word(low), _FREE, token).decode() != token:
            return _FREE
        if self._store.compare_set(self._word(high), _FREE, token).decode() != token:
            self._store.set(self._word(low), _FREE)
            return _FREE
        return token

    def _is_whole(self, token: str) -> bool:
        """Return whether both words have the token; if not, its owner is about to put it in the second, or back."""
        words = [self._word(rank) for rank in _ranks_of(token)]
        return all(self._store.check([word]) and self._store.get(word).decode() == token for word in words)

    def _meet(self, ranks: tuple[int, int], device: torch.device) -> None:
        """Make the communicator of a pair; both ranks are here."""
        peer = ranks[0] if ranks[1] == self._rank else ranks[1]
        group = InnerGroup(self._made_from, name=f"pair {ranks[0]} {ranks[1]}", ranks=list(ranks), with_nccl=False)
        group.register()
        try:
            with _own_stream(device):
                communicator = Communicator(group.group, device=device, names=ranks, options=self._options)
        except Unsupported as error:
            group.unregister()
            self._known[peer] = str(error)
        else:
            self._known[peer] = MessagePair(group, communicator)

    @staticmethod
    def _word(rank: int) -> str:
        return f"{rank}"


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context whose current stream is a new one: what is queued on the caller's may wait for other ranks."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _options_of(rank: int) -> str:
    return f"options of {rank}"


def _ranks_of(token: str) -> tuple[int, int]:
    low, high = token.partition(" ")[0].split("-")
    return int(low), int(high)
