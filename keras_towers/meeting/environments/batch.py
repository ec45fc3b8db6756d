"""Allocations of PBS and LSF."""

import collections
from collections.abc import Mapping
from pathlib import Path

from keras_towers.errors import TowerError
from keras_towers.meeting.environments.base import ClusterEnvironment


class PBS(ClusterEnvironment):
    """A job of PBS."""

    name = "PBS"

    @classmethod
    def hosts(cls, variables: Mapping[str, str]) -> dict[str, int]:
        return _counted(variables.get("PBS_NODEFILE"))


class LSF(ClusterEnvironment):
    """A job of LSF."""

    name = "LSF"

    @classmethod
    def hosts(cls, variables: Mapping[str, str]) -> dict[str, int]:
        found = _counted(variables.get("LSB_DJOB_HOSTFILE"))
        words = variables.get("LSB_MCPU_HOSTS", "").split()
        return found or dict(
            zip(words[::2], map(int, words[1::2]), strict=False)
        )


def _counted(file: str | None) -> dict[str, int]:
    """Hosts of a file with a line for each process."""
    if not file:
        return {}
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise TowerError(
            f"cannot read the list of this job's hosts: {error}"
        ) from None
    return dict(collections.Counter(lines))
