"""BytePS's scheduler and servers, beside the ranks of a job.

Each is a ``Rank`` to the launcher: its agent ends it with the job, also if the
launcher dies. Without one of them the ranks would wait for ever, so that the
job ends when one does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from keras_towers.building import byteps
from keras_towers.errors import TowerError
from keras_towers.launching import byteps_server
from keras_towers.launching.ranks import Place, Rank
from keras_towers.meeting.addresses import is_local, resolve
from keras_towers.meeting.environments import dmlc
from keras_towers.settings import BYTEPS_LAUNCHED

_SERVE = [sys.executable, "-m", byteps_server.__name__]


class Servers:
    """The scheduler and the servers of one job, all on this machine."""

    def __init__(self, number: int, address: str, plan: list[Any]):
        self._number = number
        self._address = address
        # On a machine with GPUs its processes share memory and use NCCL; where
        # there are none each counts as a machine.
        self._by_host = byteps.has_cuda()
        sizes = {slot.local_size for slot in plan}
        if self._by_host and len(sizes) > 1:
            raise TowerError(
                "with GPUs, BytePS needs the same number of processes on every "
                f"host, not {' and '.join(map(str, sorted(sizes)))}: give the "
                "hosts equal slots, and -np as their sum"
            )
        workers = plan[-1].cross_rank + 1 if self._by_host else len(plan)
        self._sockets = contextlib.ExitStack()
        self._folder = self._sockets.enter_context(
            tempfile.TemporaryDirectory(
                prefix="keras-towers-byteps-", ignore_cleanup_errors=True
            )
        )
        self._common = {
            dmlc.NUM_WORKER: str(workers),
            dmlc.NUM_SERVER: str(number),
            dmlc.ROOT_URI: address,
            dmlc.ROOT_PORT: str(_free_port(address)),
            "PYTHONUNBUFFERED": "1",
        }
        # Threads that have nothing to sum are not to keep the cores busy.
        self._frugal = {"OMP_WAIT_POLICY": "PASSIVE"}

    def start(self, start: Callable[..., Rank]) -> list[Rank]:
        """Start all of them by a job's ``start``."""
        roles = [("scheduler", "scheduler")]
        roles += [(f"server {i}", "server") for i in range(self._number)]
        return [
            start(
                Place(name, index, None, 1, self._address),
                {
                    **self._common,
                    **self._frugal,
                    dmlc.ROLE: role,
                    dmlc.NODE_HOST: self._address,
                },
                _SERVE,
            )
            for index, (name, role) in enumerate(roles)
        ]

    def environment(self, slot: Any) -> dict[str, str]:
        """The variables of a rank, given Horovod's ``SlotInfo``."""
        worker, local_rank, local_size = slot.rank, 0, 1
        own = f"{self._folder}/{slot.rank}"
        if self._by_host:
            worker = slot.cross_rank
            local_rank, local_size = slot.local_rank, slot.local_size
            own = self._folder
        here = is_local(slot.hostname)
        if here:
            os.makedirs(own, exist_ok=True)
        return {
            **self._common,
            BYTEPS_LAUNCHED: "1",
            dmlc.ROLE: "worker",
            dmlc.WORKER_ID: str(worker),
            dmlc.NODE_HOST: self._address if here else resolve(slot.hostname),
            dmlc.LOCAL_RANK: str(local_rank),
            dmlc.LOCAL_SIZE: str(local_size),
            **({"BYTEPS_SOCKET_PATH": own} if here else {}),
        }

    def clean(self) -> None:
        """Remove the sockets of the job's processes."""
        self._sockets.close()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
