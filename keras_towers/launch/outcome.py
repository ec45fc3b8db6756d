"""Which rank a job failed by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from keras_towers.launch.ranks import signal_name

# What is to be read where a rank ended because another one had: Horovod tells
# all that one has left, or the connection to it is lost.
_CONSEQUENCES = (
    "Horovod has been shut down",
    "HorovodInternalError",
    "Connection reset by peer",
    "Connection closed by peer",
    "Read error [",
    "Broken pipe",
)
_SSH_FAILED = 255


class Ended(Protocol):
    """A rank that ended by itself."""

    @property
    def code(self) -> int | None:
        """The exit code."""
        ...

    def tail(self) -> str:
        """The last that it wrote to stderr."""
        ...


@dataclass(frozen=True)
class Blame:
    """Whose end was the first.

    Attributes:
        rank: its place in the order in which ranks ended.
        certain: it did not fail as a consequence of another one's end.
    """

    rank: int
    certain: bool


def blame(ended: Sequence[Ended]) -> Blame | None:
    """Find the rank that failed first, given all that ended, in their order.

    Not always the first to end: a rank that raises tells the others by Horovod,
    and they may be gone while it still cleans up.
    """
    failed = [index for index, rank in enumerate(ended) if rank.code]
    for index in failed:
        if not is_consequence(ended[index]):
            return Blame(index, True)
    return Blame(failed[0], False) if failed else None


def is_consequence(rank: Ended) -> bool:
    """Whether a rank failed because another one had ended."""
    # A signal that nobody sent it: SIGABRT is what a C++ exception ends by.
    if rank.code and signal_name(rank.code) not in (None, "SIGABRT"):
        return False
    tail = rank.tail()
    return any(text in tail for text in _CONSEQUENCES)


def describe(name: str, code: int, host: str | None, shown: bool) -> str:
    """Say how a rank ended."""
    if host and code == _SSH_FAILED:
        return f"{name}: the connection to {host} ended"
    number = signal_name(code)
    if number:
        hint = " (out of memory?)" if number == "SIGKILL" else ""
        return f"{name} was killed by {number}{hint}"
    lines = "; its last lines are above" if shown else ""
    return f"{name} ended with exit code {code}{lines}"
