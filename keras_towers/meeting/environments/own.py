"""Ranks of ``keras-towers run`` and ``horovodrun``, and ranks by hand."""

from keras_towers.meeting.environments.base import ClusterEnvironment
from keras_towers.settings import RANK, SIZE


class Horovodrun(ClusterEnvironment):
    """A rank of ``keras-towers run``, or of Horovod's own launcher."""

    name = "keras-towers run or horovodrun"
    rank_in, size_in = "HOROVOD_RANK", "HOROVOD_SIZE"
    placed = True


class ByHand(ClusterEnvironment):
    """A rank whose place the user sets, whatever launcher started it."""

    name = rank_in = RANK
    size_in = SIZE
