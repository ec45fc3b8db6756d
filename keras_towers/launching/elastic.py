"""A job whose ranks may come and go, on Horovod's elastic driver.

The driver decides who runs where, and gives up on a host where a worker failed;
what a worker does about it is up to the script (``horovod.common.elastic``).

On one machine alone a worker's failure would thus be the end of the job. There
every slot stands for a host of its own, 127.0.0.1, 127.0.0.2 and so on: only
the slot that failed is given up.
"""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.launching.discovery import from_script, patient
from keras_towers.launching.elastic_driver import (
    Elastic,
    elastic_driver,
    elastic_handler,
    horovod,
    waits,
)
from keras_towers.launching.job import Job, signals_to
from keras_towers.launching.ranks import Console
from keras_towers.launching.rounds import Rounds, slot_name
from keras_towers.launching.ssh import check_reachable
from keras_towers.launching.supervision import stopped_by
from keras_towers.launching.workers import Workers
from keras_towers.meeting.addresses import is_local, meeting_point
from keras_towers.meeting.server import StoreServer
from keras_towers.meeting.variables import job_environment


def elastic_options(
    *,
    ranks: int | None,
    least: int | None,
    most: int | None,
    hosts: dict[str, int] | None,
    script: Path | None,
    slots: int,
    timeout_s: int,
    reset_limit: int | None,
    cooldown_s: tuple[int, int],
) -> Elastic:
    """Put the options of an elastic job together."""
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
    common: dict[str, Any] = {
        "ranks": ranks,
        "least": least,
        "most": most,
        "timeout_s": timeout_s,
        "reset_limit": reset_limit,
        "cooldown_s": cooldown_s,
    }
    if script:
        return Elastic(discover=from_script(script, slots), **common)
    hosts = hosts or {"localhost": most or ranks}
    if ranks > sum(hosts.values()):
        raise TowerError(
            f"{ranks} processes are more than the {sum(hosts.values())} slots "
            "of the hosts"
        )
    divided = len(hosts) == 1 and is_local(next(iter(hosts)))
    if len(hosts) == 1 and not divided:
        raise TowerError(
            "an elastic job on other machines needs two of them at least: "
            "Horovod gives a host up when a worker on it fails"
        )
    if divided:
        count = sum(hosts.values())
        hosts = {f"127.0.0.{number}": 1 for number in range(1, count + 1)}
    fixed = dict(hosts)
    return Elastic(discover=lambda: dict(fixed), divided=divided, **common)


def run_elastic(job: Job, elastic: Elastic) -> int:
    """Run an elastic job to its end and return the exit code."""
    if not job.verbose:
        # Horovod's driver reports by the root logger, with tracebacks.
        logging.getLogger().addHandler(logging.NullHandler())
    first = elastic.discover()
    remote = [host for host in first if not is_local(host)]
    check_reachable(remote, job.ssh_port)
    address, interface = meeting_point(job.interface, remote)
    server = StoreServer(address)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    console = Console(job.output, events.put)
    discover = patient(elastic.discover, first, console.say)
    driver = elastic_driver(server, elastic, discover, console.say)
    workers = Workers(
        job,
        console,
        address,
        divided=elastic.most or elastic.ranks if elastic.divided else None,
    )
    rounds = Rounds(driver, workers)
    server.begin_round = rounds.begin
    module = horovod("runner.elastic.rendezvous")
    handler = elastic_handler(
        module.create_rendezvous_handler(driver), rounds, console.say
    )
    workers.environment = job_environment(
        server.start(handler),
        interface=interface,
        stall_warning_s=job.stall_warning_s,
        stall_shutdown_s=job.stall_shutdown_s,
        seed=job.seed,
        elastic=True,
    )

    def drive() -> None:
        try:
            driver.wait_for_available_slots(elastic.ranks)
            driver.start(elastic.ranks, workers.run)
            events.put(driver.get_results())
        except Exception as error:
            failure = TowerError(str(error).splitlines()[0])
            failure.__cause__ = error
            events.put(failure)

    try:
        with signals_to(events):
            slots = sum(first.values())
            if slots < elastic.ranks:
                option = "-np" if elastic.ranks > elastic.least else "--min-np"
                wait = (option, elastic.ranks, elastic.timeout_s)
                console.say(waits(slots, *wait))
            threading.Thread(target=drive, daemon=True).start()
            event = events.get()
            if isinstance(event, int | OSError):
                return stopped_by(event, console)
        if isinstance(event, TowerError):
            raise event
        chief = driver.get_coordinator_info()
        return workers.verdict(
            event,
            slot_name(chief.hostname, chief.local_rank) if chief else "",
            elastic.least,
        )
    finally:
        workers.stop()
        driver.stop()
        console.close()
