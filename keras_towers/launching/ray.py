"""Makes the workers of Ray Train the ranks of a job.

Worker 0 opens the rendezvous server in its own process, whose end is the job's.
"""

# Ray is optional.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from keras_towers import settings
from keras_towers.rendezvous.addresses import LOOPBACK
from keras_towers.rendezvous.environment_variables import (
    process_environment,
    rank_environment,
)
from keras_towers.rendezvous.hosts import RankPlacement, place_ranks
from keras_towers.rendezvous.store import Endpoint
from keras_towers.rendezvous.store_server import StoreServer


@dataclass
class RanksConfig(BackendConfig):
    """Settings of the ranks: seconds until a stall is told, and ended."""

    stall_warning_s: int = settings.STALL_WARNING_S
    stall_shutdown_s: int = settings.STALL_SHUTDOWN_S

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that starts the ranks."""
        return _Ranks


class _Ranks(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        hosts = worker_group.execute(_own_address)
        endpoint, plan = worker_group.execute_single(0, meet, hosts)
        ray.get(
            [
                worker_group.execute_single_async(
                    slot.rank, _join, endpoint, slot, backend_config
                )
                for slot in plan
            ]
        )


def _own_address() -> str:
    return ray.util.get_node_ip_address()


def meet(hosts: list[str]) -> tuple[Endpoint, list[RankPlacement]]:
    """Open the server that the workers on these hosts meet at."""
    server = StoreServer(hosts[0] if len(set(hosts)) > 1 else LOOPBACK)
    plan = place_ranks(hosts)
    server.begin(plan)
    return server.endpoint, plan


def _join(endpoint: Endpoint, slot: RankPlacement, config: RanksConfig) -> None:
    common = process_environment(
        config.stall_warning_s, config.stall_shutdown_s
    )
    own = rank_environment(endpoint, slot, endpoint.address, common)
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES") == ",".join(gpus):
        own[settings.OWN_GPUS] = "1"
    os.environ.update(own)
