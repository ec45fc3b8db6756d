"""Horovod's elastic driver, which decides who runs where.

It asks once a second which hosts there are, and gives up on a host where a
worker failed, for a while that doubles each time; the first host of the last
round, which has the training's state, has rank 0 in the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.launching.discovery import Discover
from keras_towers.launching.rendezvous import horovod
from keras_towers.rendezvous import NEWS


@dataclass(frozen=True)
class Elastic:
    """How far a job may shrink and grow.

    Attributes:
        ranks: how many to start with.
        least: how many it needs to go on.
        most: how many it takes; None: all that there are slots for.
        discover: says which hosts there are, and their slots.
        divided: the hosts are slots of this machine.
        timeout_s: how long to wait for ``least`` slots.
        reset_limit: how often ranks may come and go; None: always.
        cooldown_s: shortest and longest time to keep off a host that failed.
    """

    ranks: int
    least: int
    most: int | None
    discover: Discover
    divided: bool = False
    timeout_s: int = 600
    reset_limit: int | None = None
    cooldown_s: tuple[int, int] = (5, 600)


def elastic_driver(
    server: Any,
    elastic: Elastic,
    discover: Discover,
    say: Callable[[str], None],
) -> Any:
    """Horovod's ``ElasticDriver``; says what it waits for and why it ends.

    Args:
        server: where workers find its news.
        elastic: how far the job may shrink and grow.
        discover: finds the hosts.
        say: tells the user.
    """
    module = horovod("runner.elastic.driver")
    late = horovod("runner.common.util.timeout").TimeoutException

    class _Driver(module.ElasticDriver):  # type: ignore[name-defined]
        _reason: str | None = None

        def get_worker_client(self, slot_info: Any) -> Any:
            return _News(server, super().get_worker_client(slot_info))

        def resume(self) -> None:
            left = self._host_manager.current_hosts.count_available_slots()
            if left < elastic.least:
                say(waits(left, "--min-np", elastic.least, elastic.timeout_s))
            try:
                super().resume()
            except Exception as error:
                # Horovod only logs it, and stops.
                self._reason = str(error)
                raise

        def wait_for_available_slots(self, least: int, *args: Any) -> Any:
            try:
                return super().wait_for_available_slots(least, *args)
            except late:
                raise TowerError(
                    f"there were not {least} slots within {elastic.timeout_s} "
                    "s: add hosts, or give a smaller --min-np or a longer "
                    "--elastic-timeout"
                ) from None

        def stop(self, error_message: str | None = None) -> None:
            super().stop(error_message or self._reason)

    return _Driver(
        server,
        _discovery(discover),
        elastic.least,
        elastic.most,
        timeout=elastic.timeout_s,
        reset_limit=elastic.reset_limit,
        cooldown_range=elastic.cooldown_s,
    )


def waits(slots: int, option: str, wanted: int, timeout_s: int) -> str:
    """Say that there are too few slots yet."""
    return (
        f"slots for workers: {slots}, {option} asks for {wanted}; waiting for "
        f"more, for {timeout_s} s at most (--elastic-timeout)"
    )


class _News:
    """Tells the workers that hosts have come or gone.

    Args:
        server: where those look that use ``keras_towers.elastic``.
        client: of a worker that uses Horovod's own elastic state, or None.
    """

    def __init__(self, server: Any, client: Any):
        self._server = server
        self._client = client

    def notify_hosts_updated(self, timestamp: int, update: Any) -> None:
        """Take word of it from the driver."""
        # Horovod's seconds cannot tell two changes within one second apart.
        self._server.put(NEWS, [time.time(), int(update)])
        if self._client:
            self._client.notify_hosts_updated(timestamp, update)


def _discovery(discover: Callable[[], dict[str, int]]) -> Any:
    module = horovod("runner.elastic.discovery")

    class _Discovery(module.HostDiscovery):  # type: ignore[name-defined]
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return discover()

    return _Discovery()
