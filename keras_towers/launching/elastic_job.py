"""A job whose ranks may come and go, in rounds.

A round ends when each worker has ended or asks for another; the next one has a
worker in every slot that there is, and rank 0 where the training's state is.

``Hosts`` knows the slots, ``ElasticRounds`` tells each worker of a round its
rank, ``Driver`` decides who runs where.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_towers import engines, settings
from keras_towers.errors import TowerError
from keras_towers.launching.elastic_hosts import (
    LOCAL_SLOT,
    Discover,
    Hosts,
    discover_by_script,
    split_this_machine,
)
from keras_towers.launching.elastic_rounds import ElasticRounds, key_of
from keras_towers.launching.job import Job, Running
from keras_towers.launching.rank_process import Rank, signal_name
from keras_towers.launching.supervision import end_all, stopped_by, verdict
from keras_towers.rendezvous.hosts import RankPlacement, fill_slots
from keras_towers.rendezvous.network import is_local
from keras_towers.rendezvous.store import HOSTS_UPDATED

# HostUpdateResult.mixed of horovod.runner.elastic.worker.
_ADDED_OR_REMOVED = 3


@dataclass(frozen=True)
class Elastic:
    """The limits between which a job may shrink and grow."""

    ranks: int
    least: int
    most: int | None
    discover: Discover
    cooldown_s: tuple[int, int] = (5, 600)
    timeout_s: int = settings.ELASTIC_TIMEOUT_S
    reset_limit: int | None = None


def elastic_options(
    *,
    ranks: int | None,
    least: int | None,
    most: int | None,
    hosts: dict[str, int] | None,
    script: Path | None,
    cooldown_s: tuple[int, int],
    **limits: Any,
) -> Elastic:
    """Collect the options of an elastic job."""
    least = least or ranks
    ranks = ranks or least
    if ranks is None or least is None:
        raise TowerError("an elastic job needs --min-np or -np")
    if not least <= ranks <= (most or ranks):
        raise TowerError(
            f"--min-np {least}, -np {ranks} and --max-np {most or ranks} "
            "have to be in this order, smallest first"
        )
    if not 1 <= cooldown_s[0] <= cooldown_s[1] <= 3600:
        raise TowerError(
            "--blacklist-cooldown-range takes two numbers of seconds from 1 to "
            f"3600, smaller one first, not {cooldown_s[0]} {cooldown_s[1]}"
        )
    if script and hosts:
        raise TowerError("give --host-discovery-script or hosts, not both")
    if script:
        discover = discover_by_script(script)
    else:
        hosts = dict(hosts or {"localhost": most or ranks})
        count = sum(hosts.values())
        if ranks > count:
            raise TowerError(
                f"{ranks} processes are more than the {count} slots of the "
                "hosts"
            )
        if len(hosts) == 1 and not is_local(next(iter(hosts))):
            raise TowerError(
                "an elastic job on other machines needs two of them at "
                "least: a host is given up when a worker on it fails"
            )
        discover = hosts.copy
    return Elastic(
        ranks,
        least,
        most,
        split_this_machine(discover),
        cooldown_s=cooldown_s,
        **limits,
    )


def run_elastic(job: Job, elastic: Elastic) -> int:
    """Run an elastic job to its end and return the exit code."""
    engines.engine_of_job(None).check_installed()
    first = elastic.discover()
    with Running(job, first) as run:
        return Driver(run, elastic, first).drive()


class _JobEnded(Exception):
    """Ends the rounds of a job, with its exit code."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Driver:
    """Decides who runs where, from round to round."""

    def __init__(
        self, run: Running, elastic: Elastic, first: dict[str, int]
    ) -> None:
        self._run, self._elastic = run, elastic
        self._environment = run.environment(elastic=True)
        self._say = run.console.say
        self.hosts = Hosts(
            elastic.discover, first, elastic.cooldown_s, self._say
        )
        self.rounds = ElasticRounds(lambda: run.events.put(None))
        run.server.place = self.rounds.place
        run.server.on_connected = self.rounds.hold
        self.workers: dict[str, Rank] = {}
        self._offered: dict[str, int] = {}
        self._short_since: float | None = None

    def drive(self) -> int:
        """Run workers until the job ends, and return its exit code."""
        over = threading.Event()
        self._run.undo.callback(over.set)
        threading.Thread(
            target=self._discover, args=(over,), daemon=True
        ).start()
        ranks, least = self._elastic.ranks, self._elastic.least
        wanted, option = ranks, "-np" if ranks > least else "--min-np"
        changes = 0
        try:
            while True:
                self._begin_round(self._wait_for_slots(wanted, option))
                while not self.rounds.over:
                    self._announce_hosts()
                    self._handle_event()
                self._end_round(changes)
                wanted, option = least, "--min-np"
                changes += 1
        except _JobEnded as end:
            return end.code

    def _discover(self, over: threading.Event) -> None:
        while not over.wait(settings.DISCOVERY_PAUSE_S):
            self.hosts.discover()
            self._run.events.put(None)

    def _handle_event(self) -> None:
        """Wait until something happens; hosts are discovered once a second."""
        event = self._run.events.get()
        if isinstance(event, int | OSError):
            raise _JobEnded(stopped_by(event, self._run.console))
        if isinstance(event, Rank):
            if event.code and not event.stopped:
                self._say(verdict([event], "worker")[1])
            for key, worker in self.workers.items():
                if worker is event:
                    self.rounds.end(key)

    def _end_round(self, changes: int) -> None:
        """Avoid the hosts of failed workers, or end the job."""
        plan, ended = self.rounds.plan, self.rounds.ended
        workers = [self.workers.get(key) for key in ended]
        finished = any(worker and worker.code == 0 for worker in workers)
        if finished or len(ended) == len(plan):
            raise _JobEnded(self.verdict())
        failed = {plan[key].hostname for key in ended}
        for host in failed:
            self.hosts.avoid(host)
        given_up = [k for k, slot in plan.items() if slot.hostname in failed]
        end_all([self.workers[k] for k in given_up if k in self.workers])
        if len(given_up) == len(plan):
            raise _JobEnded(self.verdict())
        limit = self._elastic.reset_limit
        if limit is not None and changes >= limit:
            self._say(f"ranks came or went over {limit} times (--reset-limit)")
            raise _JobEnded(1)

    def verdict(self) -> int:
        """End all workers; return the exit code of the job, and the cause."""
        end_all(self._run.processes)
        plan = self.rounds.plan
        keys = dict.fromkeys((*self.rounds.ended, *plan))
        ended = {k: self.workers[k] for k in keys if k in self.workers}
        code, text = verdict(list(ended.values()), "worker")
        well = [key for key, worker in ended.items() if worker.code == 0]
        lost = all(signal_name(w.code) for w in ended.values() if w.code)
        enough = len(well) >= self._elastic.least
        if lost and enough and next(iter(plan)) in well:
            # Lost after the training, as others may be in it.
            return 0
        if not ended:
            code, text = 1, "no worker could be started"
        if signal_name(code):
            text += ", and no worker is left that has the training's state"
        if code:
            self._say(text)
        return code

    def _wait_for_slots(self, wanted: int, option: str) -> dict[str, int]:
        """Wait for enough slots; return those of each host."""
        if self._short_since is None or self.rounds.met:
            # Hosts that are tried in vain, again and again, are no progress.
            self._short_since = time.monotonic()
        limit_s, said = self._elastic.timeout_s, False
        while True:
            hosts = self.hosts.available()
            found = sum(hosts.values())
            if found >= wanted:
                return hosts
            if time.monotonic() >= self._short_since + limit_s:
                break
            if not said:
                said = True
                self._say(
                    f"slots for workers: {found}, {option} asks for {wanted}; "
                    f"waiting for more, for {limit_s} s at most "
                    "(--elastic-timeout)"
                )
            self._handle_event()
        text = (
            f"there were not {wanted} slots within {limit_s} s: add hosts, or "
            "give a smaller --min-np or a longer --elastic-timeout"
        )
        if not self.rounds.plan:
            raise TowerError(text)
        self._say(text)
        raise _JobEnded(1)

    def _begin_round(self, hosts: dict[str, int]) -> None:
        """Start a worker in each slot that has none, and let all meet."""
        plan = fill_slots(hosts, self._elastic.most)
        chief = self.workers.get(key_of(plan[0]))
        if self.rounds.plan and (chief is None or chief.code is not None):
            self._say("no host is left that has the state of the training")
            raise _JobEnded(1)
        self._offered = hosts
        self._run.server.begin(plan)
        self.rounds.begin(plan)
        for key, worker in self.workers.items():
            if worker.code is None and key not in self.rounds.plan:
                self._say(f"worker {worker.name} leaves, as its host has")
                worker.stop()
        for slot in plan:
            old = self.workers.get(key_of(slot))
            if old is None or old.code is not None:
                self._start(slot)

    def _start(self, slot: RankPlacement) -> None:
        taken = {rank.index for rank in self._run.processes}
        # Its rank, unless that is taken: workers may outlive their rank.
        number = slot.rank if slot.rank not in taken else max(taken) + 1
        if slot.rank in taken:
            self._say(
                f"worker {number} on {slot.hostname}: rank {slot.rank} of "
                f"{slot.size}"
            )
        key, sharing = key_of(slot), slot.local_size
        variables = {**self._environment, **slot.environment}
        if slot.hostname.startswith(LOCAL_SLOT):
            # It passes for a host with one rank.
            place = int(slot.hostname.removeprefix(LOCAL_SLOT))
            # It may have gone meanwhile.
            sharing = max(place, self.hosts.local_slots)
            variables.update(_own_gpus(place - 1, sharing))
        try:
            self.workers[key] = Rank(
                self._run,
                str(number),
                number,
                variables,
                host=slot.hostname,
                local_size=sharing,
            )
        except (TowerError, OSError) as error:
            self._say(f"no worker on {slot.hostname}: {error}")
            self.workers.pop(key, None)
            self.rounds.end(key)
            self._run.events.put(None)

    def _announce_hosts(self) -> None:
        """Notify the workers that hosts were added or removed."""
        before, now = self._offered, self.hosts.available()
        plan = fill_slots(now, self._elastic.most)
        if now == before or plan == [*self.rounds.plan.values()]:
            return
        self._offered = now
        # Horovod's seconds cannot tell two changes within one second apart.
        self._run.server.put(HOSTS_UPDATED, [time.time(), _ADDED_OR_REMOVED])


def _own_gpus(index: int, count: int) -> dict[str, str]:
    """The GPUs of a slot, where each slot counts as a host with one rank."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu]
    else:
        number = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
        gpus = [str(gpu) for gpu in range(number)]
    share = len(gpus) // count
    if share == 0:
        return {}
    first = index * share
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + share])}
