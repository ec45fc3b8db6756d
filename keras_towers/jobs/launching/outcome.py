"""The outcome of a job: who failed first and why, and the exit code.

``supervision.py`` asks for it when the ranks have ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from keras_towers.foundation import settings
from keras_towers.foundation.errors import EXCHANGE_WITH, EXIT_AGAIN
from keras_towers.jobs import agent
from keras_towers.jobs.launching.output import Console
from keras_towers.jobs.launching.rank_process import RankProcess, signal_name

# Output of ranks that fail because another one failed or ended: the engine
# reports that a rank has left, or that its connection to it breaks. What a
# script says of connections of its own is no such report.
_CONSEQUENCES = (
    EXCHANGE_WITH,
    "Horovod has been shut down",
    "HorovodInternalError",
    "/gloo/transport/",
    "Additional GRPC error information from remote target",
)
# The report of a rank that ends its connections itself, after an error.
_OWN_END = "Horovod background loop uncaught exception"
_SSH_FAILED = 255


@dataclass(frozen=True)
class Connected:
    """The event that a rank has connected to its job."""

    rank: int


class HostsChanged:
    """The event that an elastic job's hosts are others than its ranks'."""


@dataclass(frozen=True)
class Outcome:
    """How a round of a job ended; the cause is None if it succeeded.

    Attributes:
        lost: the processes that did not fail by themselves, or that asked to be
            started again: a job that is started again may go on.
    """

    code: int = 0
    cause: RankProcess | int | OSError | None = None
    text: str = ""
    lost: tuple[RankProcess, ...] = ()


def report_stop(reason: int | OSError, console: Console) -> int:
    """Print why the launcher had to end a job; return the exit code."""
    if isinstance(reason, BrokenPipeError):
        # As for any program of a pipeline when the next one has ended.
        return 128 + signal.SIGPIPE
    if isinstance(reason, OSError):
        console.say(
            f"ended, because the output of the job cannot be written to "
            f"{reason.filename}: {reason.strerror}"
        )
        return 1
    console.say(f"stopped by {signal.Signals(reason).name}")
    return 128 + reason


def verdict(ended: list[RankProcess], kind: str) -> Outcome:
    """How a job ended, from the ends of its ranks."""
    culprit = find_culprit(ended)
    if culprit is None:
        return Outcome()
    rank, certain = culprit
    assert rank.code
    name = f"{kind} {rank.name}" if rank.name else "the script"
    text = describe(name, rank.code, rank.host, bool(rank.tail()))
    succeeded = [other.name for other in ended if other.code == 0]
    if not certain and succeeded:
        # No rank failed by itself, but one ended early.
        text += f"; {kind} {succeeded[0]} had already ended with exit code 0"
    return Outcome(rank.code, rank, text, lost_among(ended))


def end_all(ranks: list[RankProcess]) -> None:
    """End all running ranks; wait for them, and kill what does not end."""
    running = [rank for rank in ranks if rank.code is None]
    for rank in running:
        rank.stop()
    until = time.monotonic() + 2 * settings.GRACE_S + 2
    while any(rank.code is None for rank in running):
        if time.monotonic() > until:
            for rank in running:
                rank.kill()
            return
        time.sleep(0.02)


def find_culprit(
    ended: Sequence[RankProcess],
) -> tuple[RankProcess, bool] | None:
    """Return the rank that failed first, and whether it failed by itself.

    It need not be the first to end: when a rank raises an error, Horovod
    notifies all ranks, and they may exit while that one is still cleaning up.
    Among ranks that are still running, ``failed_calls`` tells it.
    """
    failed, first = [rank for rank in ended if rank.code], _failed_first(ended)
    return ([*first, *failed][0], bool(first)) if failed else None


def _failed_first(ended: Sequence[RankProcess]) -> list[RankProcess]:
    """The processes that failed, though no other one is why."""
    return [rank for rank in ended if rank.code and not is_consequence(rank)]


def failed_by_themselves(ended: Sequence[RankProcess]) -> list[RankProcess]:
    """The processes that failed, unless another one or the launcher is why.

    One that asks to be started again has not failed.
    """
    failed = (r for r in _failed_first(ended) if r.code != EXIT_AGAIN)
    return [rank for rank in failed if not rank.stopped]


def lost_among(ended: Sequence[RankProcess]) -> tuple[RankProcess, ...]:
    """The ranks that were killed, lost their host, or ask for a new start."""
    return tuple(
        rank
        for rank in _failed_first(ended)
        if rank.code == EXIT_AGAIN or rank.killed or lost_its_host(rank)
    )


def lost_its_host(rank: RankProcess) -> bool:
    """Whether the connection to the host of a rank has ended."""
    return bool(rank.host) and rank.code == _SSH_FAILED


def is_consequence(rank: RankProcess) -> bool:
    """Whether a rank failed because another one ended."""
    # An uncaught C++ exception raises SIGABRT; it is not sent from outside.
    if rank.code and signal_name(rank.code) not in (None, "SIGABRT"):
        return False
    lines = [line for line in rank.tail().splitlines() if _OWN_END not in line]
    has_text = any(text in line for text in _CONSEQUENCES for line in lines)
    return rank.follows or has_text


def describe(
    name: str, code: int, host: str | None, output_was_shown: bool
) -> str:
    """Describe how a rank ended."""
    if host and code == _SSH_FAILED:
        return f"{name}: lost the ssh connection to {host}"
    killed_by = signal_name(code)
    if code == agent.FROZEN:
        return (
            f"{name} is lost: it was stopped (SIGSTOP) for "
            f"{settings.FROZEN_S:.0f} s, and was killed"
        )
    if killed_by:
        hint = " (out of memory?)" if killed_by == "SIGKILL" else ""
        return f"{name} was killed by {killed_by}{hint}"
    lines = "; its last lines are above" if output_was_shown else ""
    return f"{name} ended with exit code {code}{lines}"
