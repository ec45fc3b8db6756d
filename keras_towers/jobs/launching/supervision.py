"""Watches the ranks of a job until it ends.

After a Ctrl-C, or if a rank fails, ``outcome.end_all`` asks the agent of each
process to end it (``agent.py``).
"""

from __future__ import annotations

import dataclasses
import math
import queue
import signal
import time
from collections.abc import Sequence

from keras_towers.foundation import settings
from keras_towers.foundation.errors import EXIT_AGAIN
from keras_towers.jobs.launching.job import RunningJob
from keras_towers.jobs.launching.outcome import (
    Connected,
    HostsChanged,
    Outcome,
    describe,
    end_all,
    failed_by_themselves,
    find_culprit,
    lost_among,
    report_stop,
    verdict,
)
from keras_towers.jobs.launching.rank_process import RankProcess
from keras_towers.jobs.rendezvous import store
from keras_towers.jobs.rendezvous.liveness import TaskState

_FORWARDED = {signal.SIGTERM, signal.SIGUSR1}


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
            # An elastic job does not need the other ranks any more.
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
                if event.code and not find_culprit(self._ended):
                    how = describe(event.name, event.code, None, True)
                    text = f"{how}, and the job cannot go on without it"
                    return self._report(event.code, event, text)
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
            rank.send(number)
        if number == signal.SIGTERM:
            self._wait_at_most(self._run.job.grace_s)

    def _regroup(self) -> None:
        """Let the ranks make a backup and end, once they can go on from one."""
        run, ready = self._run, self._run.server.get(store.RESUMES)
        if self._regroups or self._forwarded or not (ready and run.may_restart):
            return
        self._regroups = True
        run.console.say("hosts have come or gone: all ranks back up and end")
        self._signal(signal.SIGTERM)

    def _has_finished(self) -> bool:
        """Whether the rank that does what only one does has come to its end."""
        chief = self._ranks[0]
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
        told = self._run.server.get(f"{store.ERROR}{event.index}")
        event.follows = bool(told and told[1])
        # Not every engine tells ranks that another one has left the job.
        name = f"{self._kind} {event.name}"
        self._run.server.gone[event.index] = name, TaskState.ENDED
        culprit = find_culprit(self._ended)
        if culprit:
            _, certain = culprit
            self._wait_at_most(
                settings.FAILURE_REPORT_S if certain else settings.CAUSE_WAIT_S
            )

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
