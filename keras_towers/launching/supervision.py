"""Watches the ranks of a job until it ends, and reports why it ended."""

from __future__ import annotations

import dataclasses
import math
import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras_towers import settings
from keras_towers.errors import EXIT_AGAIN, FAILED_ON
from keras_towers.launching.output import Console
from keras_towers.launching.rank_process import RankProcess, signal_name
from keras_towers.rendezvous import store
from keras_towers.rendezvous.liveness import State

if TYPE_CHECKING:
    from keras_towers.launching.job import RunningJob

# Output of ranks that fail because another one failed or ended: Horovod reports
# that a rank has left, or the connection to it breaks.
_CONSEQUENCES = (
    FAILED_ON,
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


class Supervisor:
    """Waits for the end of a job.

    SIGTERM and SIGUSR1 are forwarded to the ranks that train, which may make a
    backup. Parameter servers are ended last.

    Args:
        run: the job.
        kind: how messages call a rank.
        helpers: processes without which the job cannot go on.
    """

    def __init__(
        self,
        run: RunningJob,
        kind: str = "rank",
        helpers: Sequence[RankProcess] = (),
    ):
        self._run, self._kind, self._helpers = run, kind, helpers
        self._ranks = sorted(
            (rank for rank in run.processes if rank not in helpers),
            key=lambda rank: rank.index,
        )
        self._ended: list[RankProcess] = []
        self._connected: set[int] = set()
        self._forwarded: set[int] = set()
        self._regroups = False
        self._deadline = math.inf

    def wait(self, how_to_connect: str) -> Outcome:
        """Wait for the end of the job, and report it.

        Args:
            how_to_connect: the advice if the ranks never connected.
        """
        console, ranks = self._run.console, self._ranks
        early = self._wait_for_ranks()
        if early:
            return early
        end_all(ranks)
        if self._forwarded and any(r.code == EXIT_AGAIN for r in self._ended):
            numbers = sorted(self._forwarded)
            names = " and ".join(signal.Signals(n).name for n in numbers)
            code, then = EXIT_AGAIN, "start the script again to resume"
            if self._run.backup_ends_with_job:
                code = 128 + numbers[0]
                then = (
                    "commits of kt.elastic end with their job: kt.Backup makes "
                    "a backup that another job resumes"
                )
            text = f"ended by {names}; {then} (exit code {code})"
            return self._report(code, numbers[0], text)
        if signal.SIGTERM in self._forwarded:
            code = report_stop(signal.SIGTERM, console)
            return Outcome(code, signal.SIGTERM)
        outcome = verdict(self._ended, self._kind)
        if self._regroups and self._have_left():
            return Outcome(EXIT_AGAIN, lost=tuple(ranks))
        if self._forwarded:
            # The signal that was forwarded may have killed them.
            outcome = dataclasses.replace(outcome, lost=())
        elif outcome.cause in outcome.lost and self._has_finished():
            # What an elastic job trains does not need the others any more.
            code = 0 if self._run.job.elastic else outcome.code
            outcome = dataclasses.replace(outcome, code=code, lost=())
        is_separate = not (self._connected or self._run.job.no_strategy)
        if outcome.text:
            console.say(outcome.text)
        elif len(ranks) > 1 and is_separate:
            console.say(
                f"the {len(ranks)} processes never connected: each ran the "
                f"{self._run.job.runs} on its own. To train one model in all "
                f"of them, {how_to_connect}"
            )
        return outcome

    def _wait_for_ranks(self) -> Outcome | None:
        """Handle events until the ranks have ended, or have had enough time.

        Returns:
            How the job has ended, if something else has ended it.
        """
        while len(self._ended) < len(self._ranks):
            left_s = max(0, self._deadline - time.monotonic())
            try:
                event = self._run.events.get(
                    timeout=None if left_s == math.inf else left_s
                )
            except queue.Empty:
                return None
            if isinstance(event, HostsChanged):
                self._regroup()
            elif isinstance(event, int) and event in (
                _FORWARDED - self._forwarded
            ):
                self._forward(event)
            elif isinstance(event, int | OSError):
                return Outcome(report_stop(event, self._run.console), event)
            elif self._is_stale(event):
                continue
            elif event in self._helpers:
                # It may have ended because a rank failed.
                if not find_culprit(self._ended):
                    how = describe(event.name, event.code or 0, None, True)
                    text = f"{how}, and the job cannot go on without it"
                    return self._report(event.code or 1, event, text)
            else:
                self._record(event)
                early = self._find_unconnected()
                if early:
                    return early
        return None

    def _is_stale(self, event: object) -> bool:
        """Whether it is the end of a process of an earlier round."""
        return isinstance(event, RankProcess) and not (
            event in self._ranks or event in self._helpers
        )

    def _forward(self, number: int) -> None:
        self._forwarded.add(number)
        self._signal(number)

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            if not rank.serves:
                rank.send(number)
        if number == signal.SIGTERM:
            self._wait_at_most(self._run.job.grace_s)

    def _regroup(self) -> None:
        """Let the ranks make a backup and end, once they can go on from one."""
        run, ready = self._run, self._run.server.get(store.RESUMES)
        if self._regroups or self._forwarded or not (ready and run.again):
            return
        self._regroups = True
        run.console.say("hosts have come or gone: all ranks back up and end")
        self._signal(signal.SIGTERM)

    def _has_finished(self) -> bool:
        """Whether the rank that does what only one does has come to its end."""
        chief = next(rank for rank in self._ranks if not rank.serves)
        return chief in self._ended and chief.code == 0

    def _have_left(self) -> bool:
        """Whether the ranks have ended because they were told to."""
        failed = failed_by_themselves(self._ended)
        return not self._has_finished() and all(r.killed for r in failed)

    def _record(self, event: Connected | RankProcess) -> None:
        """Record that a rank has connected, or has ended."""
        if isinstance(event, Connected):
            self._connected.add(event.rank)
            if len(self._connected) == len(self._ranks):
                self._run.stand_by()
            return
        self._ended.append(event)
        # Not every engine tells ranks that another one has left the job.
        name = f"{self._kind} {event.name}"
        self._run.server.gone[event.index] = name, State.ENDED
        culprit = find_culprit(self._ended)
        if culprit:
            _, certain = culprit
            self._wait_at_most(
                settings.FAILURE_REPORT_S if certain else settings.CAUSE_WAIT_S
            )
        if all(rank in self._ended or rank.serves for rank in self._ranks):
            self._wait_at_most(settings.SERVERS_S)

    def _wait_at_most(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _find_unconnected(self) -> Outcome | None:
        """Report a rank that has ended and for which connected ranks wait."""
        early = [
            rank
            for rank in self._ended
            if not rank.code and rank.index not in self._connected
        ]
        if not early or not self._connected:
            return None
        # They would wait for minutes, until Horovod gives up.
        waits = self._ranks[min(self._connected)].name
        text = (
            f"{self._kind} {early[0].name} ended with exit code 0 before it "
            f"connected, and {self._kind} {waits} waits for it"
        )
        return self._report(1, early[0], text)

    def _report(
        self, code: int, cause: RankProcess | int, text: str
    ) -> Outcome:
        """Print and return how the job ended."""
        self._run.console.say(text)
        ended = [cause] if isinstance(cause, RankProcess) else []
        return Outcome(code, cause, text, lost_among(ended))


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
    failed = [rank for rank in ended if rank.code]
    for rank in failed:
        if not is_consequence(rank):
            return rank, True
    return (failed[0], False) if failed else None


def failed_by_themselves(ended: Sequence[RankProcess]) -> list[RankProcess]:
    """The processes that failed, unless another one or the launcher is why.

    One that asks to be started again has not failed.
    """
    return [
        rank
        for rank in ended
        if rank.code not in (None, 0, EXIT_AGAIN)
        and not rank.stopped
        and not is_consequence(rank)
    ]


def lost_among(ended: Sequence[RankProcess]) -> tuple[RankProcess, ...]:
    """The ranks that were killed, lost their host, or ask for a new start."""
    return tuple(
        rank
        for rank in ended
        if rank.code
        and not is_consequence(rank)
        and (rank.code == EXIT_AGAIN or rank.killed or lost_its_host(rank))
    )


def lost_its_host(rank: RankProcess) -> bool:
    """Whether the connection to the host of a rank has ended."""
    return bool(rank.host) and rank.code == _SSH_FAILED


def is_consequence(rank: RankProcess) -> bool:
    """Whether a rank failed because another one ended."""
    # An uncaught C++ exception raises SIGABRT; it is not sent from outside.
    if rank.code and signal_name(rank.code) not in (None, "SIGABRT"):
        return False
    tail = rank.tail()
    return any(text in tail for text in _CONSEQUENCES)


def describe(
    name: str, code: int, host: str | None, output_was_shown: bool
) -> str:
    """Describe how a rank ended."""
    if host and code == _SSH_FAILED:
        return f"{name}: lost the ssh connection to {host}"
    killed_by = signal_name(code)
    if killed_by:
        hint = " (out of memory?)" if killed_by == "SIGKILL" else ""
        return f"{name} was killed by {killed_by}{hint}"
    lines = "; its last lines are above" if output_was_shown else ""
    return f"{name} ended with exit code {code}{lines}"
