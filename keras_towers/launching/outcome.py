"""Which rank made a job fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from keras_towers.launching.ranks import signal_name

# Output of ranks that fail because another one ended: Horovod tells them that a
# rank has left, or they lose the connection to it.
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
        """The end of its stderr."""
        ...


@dataclass(frozen=True)
class Blame:
    """The rank that failed first.

    Attributes:
        rank: its index in the order in which ranks ended.
        certain: whether its failure was not caused by another rank.
    """

    rank: int
    certain: bool


def blame(ended: Sequence[Ended]) -> Blame | None:
    """Find the rank that failed first, given ranks in the order they ended.

    That is not always the first to end: a rank that raises notifies the others
    through Horovod, and they may exit while it is still cleaning up.
    """
    failed = [index for index, rank in enumerate(ended) if rank.code]
    for index in failed:
        if not is_consequence(ended[index]):
            return Blame(index, True)
    return Blame(failed[0], False) if failed else None


def is_consequence(rank: Ended) -> bool:
    """Whether a rank failed because another one ended."""
    # SIGABRT is not sent from outside: an uncaught C++ exception raises it.
    if rank.code and signal_name(rank.code) not in (None, "SIGABRT"):
        return False
    tail = rank.tail()
    return any(text in tail for text in _CONSEQUENCES)


def describe(name: str, code: int, host: str | None, shown: bool) -> str:
    """Describe how a rank ended."""
    if host and code == _SSH_FAILED:
        return f"{name}: lost the ssh connection to {host}"
    number = signal_name(code)
    if number:
        hint = " (out of memory?)" if number == "SIGKILL" else ""
        return f"{name} was killed by {number}{hint}"
    lines = "; its last lines are above" if shown else ""
    return f"{name} ended with exit code {code}{lines}"
