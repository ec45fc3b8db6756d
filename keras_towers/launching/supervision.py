"""Watches the ranks of a job until it ends, and reports why it ended."""

from __future__ import annotations

import math
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras_towers import settings
from keras_towers.errors import EXIT_AGAIN
from keras_towers.launching.output import Console
from keras_towers.launching.rank_process import RankProcess, signal_name
from keras_towers.rendezvous.liveness import State

if TYPE_CHECKING:
    from keras_towers.launching.job import RunningJob

# Output of ranks that fail because another one ended: Horovod reports that a
# rank has left, or the connection to it breaks.
_CONSEQUENCES = (
    "Horovod has been shut down",
    "HorovodInternalError",
    "Connection reset by peer",
    "Connection closed by peer",
    "Read error [",
    "Broken pipe",
)
_SSH_FAILED = 255
_FORWARDED = {signal.SIGTERM, signal.SIGUSR1}


@dataclass(frozen=True)
class Connected:
    """The event that a rank has connected to its job."""

    rank: int


@dataclass(frozen=True)
class Outcome:
    """How a job ended; the cause is None if it succeeded."""

    code: int = 0
    cause: RankProcess | int | OSError | None = None
    text: str = ""


def supervise(
    run: RunningJob,
    *,
    how_to_connect: str,
    kind: str = "rank",
    helpers: Sequence[RankProcess] = (),
) -> Outcome:
    """Wait for the end of a job.

    SIGTERM and SIGUSR1 are forwarded to the ranks that train, which may make a
    backup. Parameter servers are ended last.

    Args:
        run: the job.
        how_to_connect: the advice if the ranks never connected.
        kind: how messages call a rank.
        helpers: processes without which the job cannot go on.
    """
    console = run.console
    ranks = sorted(
        (rank for rank in run.processes if rank not in helpers),
        key=lambda rank: rank.index,
    )
    ended: list[RankProcess] = []
    connected: set[int] = set()
    forwarded: set[int] = set()
    deadline = math.inf
    while len(ended) < len(ranks):
        try:
            left_s = max(0, deadline - time.monotonic())
            event = run.events.get(
                timeout=None if left_s == math.inf else left_s
            )
        except queue.Empty:
            break
        if isinstance(event, int) and event in _FORWARDED - forwarded:
            forwarded.add(event)
            for rank in ranks:
                if not rank.serves:
                    rank.send(event)
            if event == signal.SIGTERM:
                deadline = min(deadline, time.monotonic() + run.job.grace_s)
            continue
        if isinstance(event, int | OSError):
            return Outcome(stopped_by(event, console), event)
        if isinstance(event, Connected):
            connected.add(event.rank)
        elif event in helpers:
            if blame(ended):
                continue  # It may have ended because a rank failed.
            how = describe(event.name or "", event.code or 0, None, True)
            text = f"{how}, and the job cannot go on without it"
            return _report(console, event.code or 1, event, text)
        else:
            ended.append(event)
            # Not every engine tells ranks that another one has left the job.
            name = f"{kind} {event.name}"
            run.server.gone[event.index] = name, State.ENDED
        early = [r for r in ended if not r.code and r.index not in connected]
        if early and connected:
            # Connected ranks would wait for minutes, until Horovod gives up.
            waits = ranks[min(connected)].name
            text = (
                f"{kind} {early[0].name} ended with exit code 0 before "
                f"it connected, and {kind} {waits} waits for it"
            )
            return _report(console, 1, early[0], text)
        culprit = blame(ended)
        if culprit:
            wait_s = (
                settings.FAILURE_REPORT_S
                if culprit[1]
                else settings.CAUSE_WAIT_S
            )
            deadline = min(deadline, time.monotonic() + wait_s)
        if all(rank in ended or rank.serves for rank in ranks):
            deadline = min(deadline, time.monotonic() + settings.SERVERS_S)
    end_all(ranks)
    if forwarded and any(rank.code == EXIT_AGAIN for rank in ended):
        names = " and ".join(signal.Signals(n).name for n in sorted(forwarded))
        text = (
            f"ended by {names}; start the script again to resume (exit code "
            f"{EXIT_AGAIN})"
        )
        return _report(console, EXIT_AGAIN, min(forwarded), text)
    if signal.SIGTERM in forwarded:
        return Outcome(stopped_by(signal.SIGTERM, console), signal.SIGTERM)
    outcome = verdict(ended, kind)
    if outcome.text:
        console.say(outcome.text)
    elif len(ranks) > 1 and not connected and not run.job.unconnected:
        console.say(
            f"the {len(ranks)} processes never connected: each ran the "
            "script on its own. To train one model in all of them, add "
            f"--strategy {how_to_connect} in the script"
        )
    return outcome


def _report(
    console: Console, code: int, cause: RankProcess | int, text: str
) -> Outcome:
    """Print and return how a job ended."""
    console.say(text)
    return Outcome(code, cause, text)


def stopped_by(reason: int | OSError, console: Console) -> int:
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
    culprit = blame(ended)
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
    return Outcome(rank.code, rank, text)


def end_all(ranks: list[RankProcess]) -> None:
    """End all running ranks and wait for them."""
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


def blame(ended: Sequence[RankProcess]) -> tuple[RankProcess, bool] | None:
    """Return the rank that failed first, and whether it failed by itself.

    It need not be the first to end: when a rank raises an error, Horovod
    notifies all ranks, and they may exit while that one is still cleaning up.
    """
    failed = [rank for rank in ended if rank.code]
    for rank in failed:
        if not is_consequence(rank):
            return rank, True
    return (failed[0], False) if failed else None


def is_consequence(rank: RankProcess) -> bool:
    """Whether a rank failed because another one ended."""
    # An uncaught C++ exception raises SIGABRT; it is not sent from outside.
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
