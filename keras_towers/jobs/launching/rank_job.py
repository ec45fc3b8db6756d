"""Runs a job's ranks, on the hosts that it has in each round.

``cli/run.py`` and ``function_job.py`` call ``run_job``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

from keras_towers.foundation import settings
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs import known_engines
from keras_towers.jobs.launching import outcome
from keras_towers.jobs.launching.elastic_hosts import (
    ElasticHosts,
    ElasticOptions,
    JobOver,
)
from keras_towers.jobs.launching.job import Job, RunningJob
from keras_towers.jobs.launching.rank_process import RankStart
from keras_towers.jobs.launching.supervision import Supervisor
from keras_towers.jobs.rendezvous.hosts import RankPlacement, fill_slots


def run_job(job: Job) -> outcome.Outcome:
    """Run a job whose processes are ranks until it ends."""
    engine = job.engine
    if not job.no_strategy:
        engine.check_installed()
    slots = sum(job.hosts.values())
    if job.elastic is None and slots < job.ranks:
        raise TowerError(
            f"{job.ranks} processes do not fit into the hosts' {slots} slots: "
            "give -H host:slots,... with more slots, or a smaller -np"
        )
    options = job.elastic or ElasticOptions(job.ranks, 1, job.ranks, job.hosts)
    hosts_now = options.discover()
    planned = fill_slots(hosts_now, options.max_ranks)
    with RunningJob(job, {slot.hostname for slot in planned}) as run:
        ended = threading.Event()
        hosts = ElasticHosts(
            lambda: run.within_reach(options.discover(ended)),
            run.within_reach(hosts_now),
            options.cooldown_s,
            run.console.say,
            needed=0 if job.elastic else options.min_ranks,
        )
        rounds = Rounds(run, engine, options, hosts)
        with rounds.following_hosts(ended):
            return run.run_rounds(rounds.run_round)


class Rounds:
    """Runs the ranks of a job on the hosts that it has in each round."""

    def __init__(
        self,
        run: RunningJob,
        engine: known_engines.Engine,
        options: ElasticOptions,
        hosts: ElasticHosts,
    ):
        self._run, self._engine = run, engine
        self._options, self._hosts = options, hosts
        self._plan: list[RankPlacement] = []

    @contextlib.contextmanager
    def following_hosts(self, ended: threading.Event) -> Iterator[None]:
        """Tell the job when hosts come or go, if it is elastic.

        Args:
            ended: set when the block ends, and with it what looks for hosts.
        """
        follows = threading.Thread(
            target=self._follow_hosts, args=(ended,), daemon=True
        )
        if self._run.job.elastic:
            follows.start()
        try:
            yield
        finally:
            ended.set()
            if follows.is_alive():
                # A script that ignores SIGTERM is killed.
                follows.join(2 * settings.GRACE_S)

    def _follow_hosts(self, ended: threading.Event) -> None:
        with contextlib.suppress(JobOver):
            while not ended.wait(settings.DISCOVERY_PAUSE_S):
                self._hosts.discover()
                if self._find_plan() != self._plan:
                    self._run.events.put(outcome.HostsChanged())

    def _find_plan(self) -> list[RankPlacement]:
        return fill_slots(self._hosts.available(), self._options.max_ranks)

    def run_round(self) -> outcome.Outcome:
        """Wait for enough slots, and run ranks there until they end."""
        self._avoid_hosts()
        return self._wait_for_slots() or run_ranks(
            self._run, self._engine, self._plan
        )

    def _avoid_hosts(self) -> None:
        """Avoid the hosts of ranks that failed in the round before."""
        failed = outcome.failed_by_themselves(self._run.processes)
        killed = {rank.hostname: rank.killed for rank in failed}
        for host, was_killed in killed.items():
            self._hosts.avoid(host, was_killed)

    def _wait_for_slots(self) -> outcome.Outcome | None:
        """Wait for enough slots, and plan a round there.

        Returns:
            How the job has ended, if it cannot go on.
        """
        options = self._options
        wanted, option = options.min_ranks, "--min-np"
        if not self._run.round and options.ranks > wanted:
            wanted, option = options.ranks, "-np"
        limit_s = options.timeout_s
        deadline, reported = time.monotonic() + limit_s, False
        while True:
            plan = self._find_plan()
            if len(plan) >= wanted:
                self._plan = plan
                return None
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            if not reported:
                reported = True
                self._run.console.say(
                    f"found {len(plan)} of the {wanted} slots that {option} "
                    f"asks for: waiting for more, for {limit_s} s at most "
                    "(--elastic-timeout)"
                )
            with contextlib.suppress(queue.Empty):
                pause_s = min(left_s, settings.DISCOVERY_PAUSE_S)
                event = self._run.events.get(timeout=pause_s)
                if isinstance(event, int | OSError):
                    code = outcome.report_stop(event, self._run.console)
                    return outcome.Outcome(code, event)
        text = (
            f"found fewer than {wanted} slots in {limit_s} s: add hosts, or "
            "give a smaller --min-np or a longer --elastic-timeout"
        )
        if not self._run.round:
            raise TowerError(text)
        self._run.console.say(text)
        return outcome.Outcome(1, text=text)


def run_ranks(
    run: RunningJob, engine: known_engines.Engine, plan: list[RankPlacement]
) -> outcome.Outcome:
    """Run all ranks of a plan until they end."""
    job, environment = run.job, run.environment()
    if engine is known_engines.RUNTIME:
        environment[settings.ENV_TASKS] = "1"
    run.begin_round(plan)
    servers = None
    if job.servers:
        servers = engine.load(engine.servers)(run, job.servers, plan)
    is_tagged = job.ranks > 1 or job.elastic or engine.serves
    run.start(
        [
            RankStart(
                engine.names.format(slot.rank) if is_tagged else None,
                slot.rank,
                {
                    **environment,
                    **slot.environment,
                    **(servers.environment(slot) if servers else {}),
                },
                slot.hostname,
                slot.local_size,
            )
            # By local rank, so that the logins on all hosts overlap.
            for slot in sorted(plan, key=lambda slot: slot.local_rank)
        ]
    )
    helpers = servers.processes if servers else ()
    kind = "task" if engine.serves else "rank"
    return Supervisor(run, kind, helpers).wait(
        job.how_to_connect(engine.strategy, engine.strategy_class)
    )
