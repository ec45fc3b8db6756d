"""A check that can only be the last of a job, since just rank 0 goes on."""

import os

import pytest

import keras_towers as kt
from keras_towers.foundation import settings
from keras_towers.jobs.rendezvous import watch
from tests.kit.ranks import check
from tests.processes import small as s


@check
def a_call_is_refused_when_the_other_ranks_have_ended():
    mine, strategy = s.eager(), s.Strategy()
    with strategy:
        for _ in range(2):
            mine.train_on_batch(s.X, s.Y)
    # Rank 0 makes its own while the other one is there.
    s.gather(s.RANK)
    if s.RANK == 0:
        # Who has ended is certain sooner.
        os.environ[settings.ENV_STALL_WARNING] = "5"
        watch.stop_watch()
        watch.start_watch(0, 2)
        ended = "1 has ended, and does not call {}, but rank 0 does."
        with strategy:
            # Its ranks have compared an earlier call.
            with pytest.raises(kt.TowerError) as caught:
                mine.train_on_batch(s.X, s.Y)
            # With shards in an earlier check it serves others at its end.
            serves = "rank 1 is at the end of the script"
            words = ended.format("train_on_batch"), serves
            said = str(caught.value)
            assert any(word in said for word in words), said
            advice = "after the `with` block of"
            with s.refused(ended.format("evaluate"), advice):
                mine.evaluate(s.X, s.Y, verbose=0)
        if s.Strategy is kt.MultiWorkerTowerStrategy:
            with s.refused("1 has ended", "before any of them ends"):
                s.Strategy()
