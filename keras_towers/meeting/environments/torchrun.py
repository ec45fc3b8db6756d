"""Processes of ``torchrun``, and of launchers with PyTorch's variables."""

from typing import ClassVar

from keras_towers.meeting.environments.base import ClusterEnvironment


class EnvironmentVariables(ClusterEnvironment):
    """A launcher that sets ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``."""

    name = "a launcher that sets RANK and WORLD_SIZE"
    rank_in, size_in, local_size_in = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    needs = ("WORLD_SIZE",)
    job_in: ClassVar[tuple[str, ...]] = ("MASTER_ADDR", "MASTER_PORT")
    address_in = "MASTER_ADDR"


class Torchrun(EnvironmentVariables):
    """``torchrun``, whose restarts are jobs of their own."""

    name = "torchrun"
    needs = ("TORCHELASTIC_RUN_ID",)
    job_in = (
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *EnvironmentVariables.job_in,
    )
