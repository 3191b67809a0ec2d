"""Exchange messages between two ranks, with one connection for each pair of ranks, opened at its first message.

Each pair of ranks that exchanges messages has a communicator of its own, with mailboxes only. So a group without
messages needs no memory for them. If mailboxes cannot carry a message, the pair uses two of torch's groups, one for
each direction: torch's `batch_isend_irecv` recognises batches only in its own class of groups, and in a single NCCL
group two ranks that both send first would wait for each other.

*How a pair meets.* Both ranks of a pair make a call for each message between them, so each of them opens the pair at
its own first call, where it waits for the other rank on the host, as in NCCL's groups. Unlike in NCCL, a rank that
waits also serves other ranks: in a ring in which all ranks send first, each rank waits for the next one while the
previous one waits for it. The group's store has a word for each rank: `away` (the rank is not waiting), `free` (it is
waiting), or the token of the pair that it is opening. A rank that waits for a peer tries to put one token in both
ranks' words, each only in place of `free`, and takes the first back if it cannot set the second. Both ranks see the
token in both words, and make the communicator. No rank holds a word while it waits for another word, and any pair can
take a rank that waits: so some pair can always go on, unless a rank makes no call at all. Before a rank goes on, it
puts `away` in place of `free`, so that no other rank takes it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.work import HostWork, Work
from counterpoint.errors import Misconfigured, PeerTimeout, Unsupported
from counterpoint.parallel.backend.inner import InnerGroup
from counterpoint.parallel.options import BackendOptions

c10d: Any = _distributed_c10d  # the type stubs lack half of its names
_AWAY, _FREE = "away", "free"
_BY_MAILBOX, _BY_TORCH = "mailbox", "torch"
_PAUSE_S = 1e-3


class MessagePair(Protocol):
    """Exchanges messages with one rank, another or this one; calls return a `Work` of counterpoint or of torch."""

    def send(self, tensor: Tensor) -> Any:
        """Start a send, behind the work of the current stream."""

    def recv(self, tensor: Tensor) -> Any:
        """Start a receive, behind the work of the current stream."""

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds a rank waits for the other one, from now on."""

    def end(self, how: Literal["close", "abort"]) -> None:
        """Free the pair's memory: `close` after messages under way have ended, `abort` at once."""


class MailboxPair:
    """Exchanges messages through mailboxes: a send begins before its receive is posted. See `MessagePair`."""

    def __init__(self, group: InnerGroup, communicator: Communicator) -> None:
        self._group, self._communicator = group, communicator
        self._peer = 1 - communicator.rank

    def send(self, tensor: Tensor) -> Work | None:
        """Start a send on a stream of its own. See `MessagePair.send`."""
        return self._communicator.send(tensor, self._peer, async_op=True)

    def recv(self, tensor: Tensor) -> Work | None:
        """Start a receive on a stream of its own. See `MessagePair.recv`."""
        return self._communicator.recv(tensor, self._peer, async_op=True)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds a rank waits for the other, from now on."""
        self._communicator.set_timeout(timeout_s)

    def end(self, how: Literal["close", "abort"]) -> None:
        """Close the communicator after messages under way have ended, or abort it."""
        getattr(self._communicator, how)()
        self._group.unregister()


class TorchPair:
    """Exchanges messages by torch's own backend, with one group for each direction. See `MessagePair`.

    Args:
        lines: the groups of the messages from the pair's first and from its second rank.
        rank: this rank's number in these groups.
    """

    def __init__(self, lines: Sequence[InnerGroup], rank: int) -> None:
        self._lines, self._rank = lines, rank

    def send(self, tensor: Tensor) -> Any:
        """Start a send by torch. See `MessagePair.send`."""
        return self._lines[self._rank].group.send([tensor], 1 - self._rank, 0)

    def recv(self, tensor: Tensor) -> Any:
        """Start a receive by torch. See `MessagePair.recv`."""
        return self._lines[1 - self._rank].group.recv([tensor], 1 - self._rank, 0)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds a rank waits for the other, from now on."""
        for line in self._lines:
            line.group.set_timeout(timedelta(seconds=timeout_s))

    def end(self, how: Literal["close", "abort"]) -> None:
        """Shut down or abort both groups, in one order on both ranks: NCCL's shutdown waits for the other rank."""
        for line in self._lines:
            line.end("shutdown" if how == "close" else how)


class SelfWork(HostWork):
    """Represents the send or the receive of a message from this rank to itself. See `Work`.

    Args:
        tensor: tensor that is sent, or that receives.
        timeout_s: seconds that `wait` waits for the matching call.
    """

    def __init__(self, tensor: Tensor, timeout_s: float) -> None:
        super().__init__("a message of this rank to itself", keep=(tensor,))
        self.tensor, self._timeout_s = tensor, timeout_s
        self.record()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the matching send or receive; on a GPU the current stream waits for the copy. See `Work.wait`."""
        super().wait(timeout_s or self._timeout_s)
        self.join()
        return True

    def record(self) -> None:
        """Record an event on the current stream, behind the work of this send or receive."""
        self._point = torch.cuda.current_stream().record_event() if self.tensor.is_cuda else None

    def join(self) -> None:
        """Let the current stream wait for the recorded event, and mark the tensor as used on it."""
        if self._point is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._point)
            self.tensor.record_stream(stream)


class SelfPair:
    """Copies messages of this rank to itself: the n-th receive gets the tensor of the n-th send. See `MessagePair`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sent, self._wanted = deque[SelfWork](), deque[SelfWork]()
        self._matching = threading.Lock()

    def send(self, tensor: Tensor) -> SelfWork:
        """Keep a copy of a tensor for the matching receive. See `MessagePair.send`."""
        sent = SelfWork(tensor.clone(), self._timeout_s)
        sent.end()
        self._add(self._sent, sent)
        return sent

    def recv(self, tensor: Tensor) -> SelfWork:
        """Receive the message that this rank has sent to itself, or will send. See `MessagePair.recv`."""
        wanted = SelfWork(tensor, self._timeout_s)
        self._add(self._wanted, wanted)
        return wanted

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds a receive waits for its send, from now on."""
        self._timeout_s = timeout_s

    def end(self, how: Literal["close", "abort"]) -> None:
        """Drop the messages that were not received."""
        self._sent.clear()

    def _add(self, to: deque[SelfWork], work: SelfWork) -> None:
        with self._matching:
            to.append(work)
            if not (self._sent and self._wanted):
                return
            sent, wanted = self._sent.popleft(), self._wanted.popleft()
            sent.join()
            wanted.join()
            wanted.tensor.copy_(sent.tensor)
            wanted.record()
            wanted.end()


class MessagePairs:
    """Holds this rank's connections to other ranks of a group, one `MessagePair` for each peer and mechanism.

    Args:
        inner: torch's own backends for the group.
        options: options of the group, of which `mailbox_bytes` and `ranks_per_host` count.
        timeout_s: seconds that a rank waits for another.
    """

    device_type = "cuda"  # device of the tensors for which a pair has groups of its own

    def __init__(self, inner: InnerGroup, options: BackendOptions, *, timeout_s: float) -> None:
        self._inner, self._rank = inner, inner.options.group_rank
        self._ranks_per_host = options.ranks_per_host or 1 << 30
        self._store = c10d.PrefixStore("pairs/", inner.options.store)
        self._options = CommunicatorOptions(channels=1, mailbox_bytes=options.mailbox_bytes, timeout_s=timeout_s)
        self._known: dict[tuple[int, str], MessagePair | str] = {(self._rank, _BY_TORCH): SelfPair(timeout_s)}
        self._decides = f"mailbox_bytes={options.mailbox_bytes}, ranks_per_host={options.ranks_per_host}"
        self._store.set(_options_of(self._rank), self._decides)
        self._agreed = set[int]()
        self._lock = threading.Lock()  # held by the one thread that opens pairs

    def why_torch(self, peer: int, tensor: Tensor, tag: int) -> str | None:
        """Return why torch carries a message, the same text on both ranks; None if mailboxes may carry it."""
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
        """Raise Misconfigured, on both ranks, if this rank and `peer` have different options for messages."""
        theirs = self._store.get(_options_of(peer)).decode()
        if theirs != self._decides:
            raise Misconfigured(
                f"messages of ranks {self._rank} and {peer}: {self._decides} on rank {self._rank}, {theirs} on rank "
                f"{peer}; give all ranks the same"
            )
        self._agreed.add(peer)

    def by_mailbox(self, peer: int, device: torch.device) -> MessagePair | str:
        """Return the `MailboxPair` with `peer`, opened at the first call, or a text that says why there is none."""
        return self._found(peer, _BY_MAILBOX, device)

    def by_torch(self, peer: int, device: torch.device) -> MessagePair:
        """Return the `MessagePair` with `peer` whose messages torch carries, opened at the first call."""
        found = self._found(peer, _BY_TORCH, device)
        assert not isinstance(found, str)
        return found

    def _found(self, peer: int, way: str, device: torch.device) -> MessagePair | str:
        found = self._known.get((peer, way))
        if found is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise Misconfigured(
                    f"the first message with rank {peer} in a graph capture, where no memory can be made; send or "
                    "receive one before"
                )
            with self._lock:
                self._open(peer, way, device)
            found = self._known[peer, way]
        return found

    def set_timeout(self, timeout_s: float) -> None:
        """Set how many seconds a rank waits for another, from now on."""
        self._options = replace(self._options, timeout_s=timeout_s)
        for pair in self._known.values():
            if not isinstance(pair, str):
                pair.set_timeout(timeout_s)

    def end(self, how: Literal["close", "abort"]) -> None:
        """Close or abort all pairs, in the same order on all ranks, since closing waits for the peer."""
        known, self._known = self._known, {}
        for peer, way in sorted(known, key=lambda pair: (sorted((self._rank, pair[0])), pair[1])):
            pair = known[peer, way]
            if not isinstance(pair, str):
                pair.end(how)

    def _open(self, peer: int, way: str, device: torch.device) -> None:
        """Wait until the pair with `peer` is open; meanwhile open the pairs that other ranks ask this rank for."""
        mine, deadline = str(self._rank), time.monotonic() + self._options.timeout_s
        self._store.set(mine, _FREE)
        try:
            while True:
                token = self._store.get(mine).decode()
                if token == _FREE and (peer, way) not in self._known:
                    token = self._claimed(peer, way)
                if token != _FREE and self._is_whole(token):
                    self._meet(token, device)
                    self._store.set(mine, _FREE)
                elif token == _FREE and (peer, way) in self._known:
                    if self._store.compare_set(mine, _FREE, _AWAY).decode() == _AWAY:
                        return
                elif time.monotonic() > deadline:
                    raise PeerTimeout(
                        f"rank {peer} sent nothing to rank {self._rank} and received nothing from it within "
                        f"{self._options.timeout_s:g} s; it has to, as the first message of two ranks makes memory",
                        ranks=(peer,),
                    )
                else:
                    time.sleep(_PAUSE_S * (1 + random.random()))  # random: not all ranks try again at once
        except BaseException:
            self._store.set(mine, _AWAY)
            raise

    def _claimed(self, peer: int, way: str) -> str:
        """Try to set both ranks' store entries to a token of the pair with `peer`; return the token, else `free`."""
        low, high = sorted((self._rank, peer))
        token = f"{low}-{high} {way} by {self._rank}"
        if self._store.compare_set(str(low), _FREE, token).decode() != token:
            return _FREE
        if self._store.compare_set(str(high), _FREE, token).decode() != token:
            self._store.set(str(low), _FREE)
            return _FREE
        return token

    def _is_whole(self, token: str) -> bool:
        """Return whether both ranks' store entries hold `token`; if not, the rank that made `token` will change one."""
        words = map(str, _ranks_of(token))
        return all(self._store.check([word]) and self._store.get(word).decode() == token for word in words)

    def _meet(self, token: str, device: torch.device) -> None:
        """Make the `MessagePair` that `token` names; both ranks of the pair call this together."""
        ranks, way = _ranks_of(token), token.split()[1]
        peer = ranks[0] if ranks[1] == self._rank else ranks[1]
        with _own_stream(device):
            made = self._mailboxes(ranks, device) if way == _BY_MAILBOX else self._lines(ranks, device)
        self._known[peer, way] = made

    def _mailboxes(self, ranks: tuple[int, int], device: torch.device) -> MailboxPair | str:
        """Return a `MailboxPair` on a new communicator of two ranks, or the reason if mailboxes are unsupported."""
        group = self._inner.part(f"pair {ranks[0]} {ranks[1]}", list(ranks), with_nccl=False)
        group.register()
        try:
            return MailboxPair(group, Communicator(group.group, device=device, names=ranks, options=self._options))
        except Unsupported as error:
            group.unregister()
            return str(error)

    def _lines(self, ranks: tuple[int, int], device: torch.device) -> TorchPair:
        """Return a `TorchPair` with one group for each direction; a first message connects each group now."""
        lines, here = [], ranks.index(self._rank)
        for source in ranks:
            line = self._inner.part(f"line from {source} of {ranks[0]} {ranks[1]}", list(ranks))
            call = line.group.send if source == self._rank else line.group.recv
            call([torch.zeros(1, device=device)], 1 - here, 0).wait()
            lines.append(line)
        return TorchPair(lines, here)


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with a new current stream, because work on the caller's stream may wait for other ranks."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _options_of(rank: int) -> str:
    return f"options of {rank}"


def _ranks_of(token: str) -> tuple[int, int]:
    low, high = token.split()[0].split("-")
    return int(low), int(high)
