"""Makes the workers of Ray Train the ranks of a job.

Worker 0 opens the rendezvous server in its own process, whose end is the job's;
Ray tells the others where it is. A group that Ray starts again, after a worker
was lost, meets anew.
"""

# Ray is optional.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from keras_towers.launching import agent
from keras_towers.launching.rendezvous import RendezvousServer
from keras_towers.meeting.addresses import LOOPBACK
from keras_towers.meeting.slots import Slot, slots
from keras_towers.meeting.variables import job_environment, slot_environment
from keras_towers.rendezvous import OWN_GPUS, new_secret


@dataclass(frozen=True)
class Meeting:
    """What a worker has to know to meet the others.

    Attributes:
        address: where worker 0 listens.
        port: on which port.
        secret: the job's.
        plan: the place of each worker.
    """

    address: str
    port: int
    secret: str
    plan: list[Slot]


@dataclass
class RanksConfig(BackendConfig):
    """Settings of the ranks.

    Attributes:
        stall_warning_s: seconds until a waiting rank reports which ranks it
            waits for; 0: never.
        stall_shutdown_s: seconds until a stalled job is ended; 0: never.
    """

    stall_warning_s: int = 30
    stall_shutdown_s: int = 600

    @property
    def backend_cls(self) -> type[Backend]:
        """What starts the ranks."""
        return _Ranks


class _Ranks(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        hosts = worker_group.execute(_own_address)
        meeting = worker_group.execute_single(0, meet, hosts)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, _join, meeting, rank, backend_config
                )
                for rank in range(len(hosts))
            ]
        )


def _own_address() -> str:
    return ray.util.get_node_ip_address()


def meet(hosts: list[str]) -> Meeting:
    """Open the server that all workers meet at, in this process.

    Args:
        hosts: the address of each worker's machine.
    """
    address = hosts[0] if len(set(hosts)) > 1 else LOOPBACK
    secret = new_secret()
    server = RendezvousServer(address, secret)
    port = server.start()
    plan = slots(hosts)
    server.init(plan)
    return Meeting(address, port, secret, plan)


def _join(meeting: Meeting, rank: int, config: RanksConfig) -> None:
    own = environment_of(meeting, rank, config)
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES") == ",".join(gpus):
        own[OWN_GPUS] = "1"
    os.environ.update(own)


def environment_of(
    meeting: Meeting, rank: int, config: RanksConfig
) -> dict[str, str]:
    """The variables of a rank, computed on its machine."""
    slot = meeting.plan[rank]
    everything = {
        **os.environ,
        **job_environment(
            rendezvous=meeting.address,
            port=meeting.port,
            secret=meeting.secret,
            interface=agent.interface_towards(meeting.address),
            stall_warning_s=config.stall_warning_s,
            stall_shutdown_s=config.stall_shutdown_s,
            seed=None,
            elastic=False,
        ),
        **slot_environment(slot),
    }
    agent.share_cores(everything, slot.local_size)
    return everything
