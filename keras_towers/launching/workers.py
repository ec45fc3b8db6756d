"""The workers of an elastic job."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.launching.job import Job
from keras_towers.launching.ranks import Console, Place, Rank, signal_name
from keras_towers.launching.rounds import slot_name
from keras_towers.launching.supervision import end_all, verdict
from keras_towers.meeting.addresses import LOOPBACK, is_local
from keras_towers.meeting.variables import slot_environment


class Workers:
    """Starts workers for Horovod's elastic driver and remembers them."""

    def __init__(
        self,
        job: Job,
        console: Console,
        address: str,
        divided: int | None = None,
    ):
        self._job = job
        self._divided = divided
        self._console = console
        self.environment: dict[str, str] = {}
        self._address = address
        self._lock = threading.Lock()
        self._ranks: list[Rank] = []
        self._by_slot: dict[str, Rank] = {}
        self._ended: set[str] = set()
        self._stopping = False

    def run(
        self, slot: Any, events: list[threading.Event]
    ) -> tuple[int, float]:
        """Run a worker to its end, for the driver.

        Args:
            slot: Horovod's ``SlotInfo``.
        """
        try:
            return self._run(slot, events), time.time()
        finally:
            with self._lock:
                self._ended.add(slot_name(slot.hostname, slot.local_rank))

    def _run(self, slot: Any, events: list[threading.Event]) -> int:
        try:
            rank = self._start(slot)
        except (TowerError, OSError) as error:
            self._console.say(f"no worker on {slot.hostname}: {error}")
            return 1
        if rank is None:
            return 1
        while rank.code is None:
            if any(event.is_set() for event in events):
                rank.stop()
            time.sleep(settings.POLL_S)
        if rank.code and not rank.stopped:
            self._console.say(verdict([rank], "worker")[1])
        return rank.code

    def _start(self, slot: Any) -> Rank | None:
        host = None if is_local(slot.hostname) else slot.hostname
        if host and self._address == LOOPBACK:
            raise TowerError(
                "the job meets on loopback, since it began on this machine "
                "alone; start it with --network-interface"
            )
        own = {**self.environment, **slot_environment(slot)}
        if self._divided:
            index = int(slot.hostname.rpartition(".")[2]) - 1
            own.update(_own_gpus(index, self._divided))
        with self._lock:
            if self._stopping:
                return None
            # Its rank, unless that is taken: workers may outlive their rank.
            taken = {rank.place.index for rank in self._ranks}
            number = slot.rank if slot.rank not in taken else max(taken) + 1
            place = Place(
                name=str(number),
                index=number,
                host=host,
                local_size=self._divided or slot.local_size,
                rendezvous=self._address,
            )
            rank = Rank(
                place,
                self._job.command,
                own,
                self._console,
                self._job.ssh_port,
                lambda rank: None,
            )
            self._ranks.append(rank)
            self._by_slot[slot_name(slot.hostname, slot.local_rank)] = rank
        if self._job.verbose or slot.rank in taken:
            self._console.say(
                f"worker {number} on {slot.hostname}: rank {slot.rank} of "
                f"{slot.size}"
            )
        return rank

    def any_ended(self, slots: Set[str]) -> bool:
        """Whether the worker of one of these slots has ended."""
        with self._lock:
            return not self._ended.isdisjoint(slots)

    def forget(self, slots: Set[str]) -> None:
        """Others are about to start in these slots."""
        with self._lock:
            self._ended -= slots

    def stop(self) -> None:
        """End all, and start no more."""
        with self._lock:
            self._stopping = True
        end_all(self._ranks)

    def verdict(self, results: Any, chief: str, least: int) -> int:
        """The exit code of the job, given Horovod's ``Results``."""
        if results.error_message:
            self._console.say(results.error_message.splitlines()[0])
            return 1
        if not results.worker_results:
            self._console.say("fewer ranks than --min-np asks for could go on")
            return 1
        by_time = sorted(
            results.worker_results.items(), key=lambda item: item[1][1]
        )
        ended = [
            self._by_slot[name] for name, _ in by_time if name in self._by_slot
        ]
        code, text = verdict(ended, "worker")
        well = [name for name, (end, _) in by_time if end == 0]
        killed = all(signal_name(rank.code) for rank in ended if rank.code)
        if killed and chief in well and len(well) >= least:
            # Lost after the training, as others may be in it.
            return 0
        if code:
            self._console.say(text)
        return code


def _own_gpus(index: int, count: int) -> dict[str, str]:
    """The GPUs of one slot, where each passes for a host with one rank."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu]
    else:
        folder = Path("/proc/driver/nvidia/gpus")
        number = len(list(folder.iterdir())) if folder.is_dir() else 0
        gpus = [str(gpu) for gpu in range(number)]
    each = len(gpus) // count
    if each == 0:
        return {}
    mine = gpus[index * each : (index + 1) * each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
