"""Horovod's elastic driver, which decides who runs where.

It asks once a second which hosts there are, and gives up on a host where a
worker failed, for a while that doubles each time; the first host of the last
round, which has the training's state, has rank 0 in the next.
"""

from __future__ import annotations

import importlib
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from keras_towers.errors import TowerError
from keras_towers.launching.discovery import Discover
from keras_towers.launching.rounds import Rounds
from keras_towers.meeting.server import MEETING_SCOPE, Guard, rank_of
from keras_towers.meeting.store import NEWS

# The scope in which Horovod's own elastic state leaves a pickle.
_PICKLED_SCOPE = "worker_addresses"


def horovod(module: str) -> ModuleType:
    """Import a module of Horovod's launcher."""
    name = f"horovod.{module}"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("horovod"):
            reason = "Horovod is not installed in this environment"
        else:
            reason = f"Horovod does not load in this environment ({error})"
        advice = "run `keras-towers install horovod`"
        raise TowerError(f"{reason}: {advice}.") from error


@dataclass(frozen=True)
class Elastic:
    """The limits within which a job may shrink and grow.

    Attributes:
        most: how many it takes; None: all that there are slots for.
        reset_limit: how often ranks may come and go; None: always.
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
    """Horovod's ``ElasticDriver``; says what it waits for and why it ends."""
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


def elastic_handler(
    base: Any, rounds: Rounds, say: Callable[[str], None]
) -> Any:
    """Horovod's elastic handler, which answers nobody before all have come.

    Args:
        base: Horovod's.
    """
    # How long ranks wait for one another to start and how long for one that has
    # died in the middle of a reduction is one setting of Horovod. Here the
    # first wait is the server's, so that the second can be short.
    removed = horovod("runner.common.util.hosts").INVALID_SLOT_INFO

    class _Handler(base):
        def _get_rank_and_size(self, host, local_rank):
            slot = rounds.place(host, local_rank, self.connection)
            return (slot or removed).to_response_string().encode()

        def _put_value(self, scope, key, value):
            address = ipaddress.ip_address(self.server.server_address[0])
            if scope == _PICKLED_SCOPE and not address.is_loopback:
                # It is not signed, and the token may have been read on the way.
                say(
                    f"worker {key} uses Horovod's own elastic state and so, "
                    "over a network, is not told when hosts are added; "
                    "keras_towers.elastic is"
                )
                return
            super()._put_value(scope, key, value)
            if scope == MEETING_SCOPE:
                rounds.hold(rank_of(key), self.connection)

    return type("_Guarded", (Guard, _Handler), {})
