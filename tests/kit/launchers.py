"""What launchers and managers of clusters tell the processes that they start.

The tests may be run by one of them; nothing in a test is to hear of that.
"""

import os

from keras_towers.meeting.environments import LAUNCHERS

_RANKS = {launcher.rank_in for launcher in LAUNCHERS}
_TOLD = (
    *("HOROVOD_", "SLURM", "OMPI_", "PMI_", "PMIX_", "I_MPI_", "PBS_", "LSB_"),
    *("TORCHELASTIC_", "DMLC_", "TF_CONFIG", "TF_NUM_", "OMP_"),
    *("WORLD_SIZE", "LOCAL_RANK"),
)


def inherited() -> dict[str, str]:
    """The environment without what a launcher has told these tests."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _RANKS and not name.startswith(_TOLD)
    }


def forget() -> None:
    """Leave nothing of it in the environment."""
    for name in os.environ.keys() - inherited():
        del os.environ[name]
