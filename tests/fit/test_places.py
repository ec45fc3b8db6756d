"""Which processes take part in a call, for each purpose."""

import dataclasses

import pytest

import keras_towers as kt
from keras_towers.fit.options import StrategyOptions
from keras_towers.fit.places import Places
from keras_towers.transport import SingleProcess


class Third(SingleProcess):
    """The third of four processes."""

    rank, size = 2, 4


def places(kind="fit", workers=False, **options) -> Places:
    job = Third()
    config = dataclasses.replace(
        kt.TowerStrategy(3)._config,
        job=job,
        transport=SingleProcess() if workers else job,
        options=StrategyOptions(**options),
    )
    return config.places(kind)


def sizes(found):
    ranks = found.ranks
    return ranks.job.size, ranks.batch.size, ranks.step.size, ranks.shards.size


ALL, OWN = (4, 4, 4, 4), (4, 1, 1, 1)


@pytest.mark.parametrize(
    ("options", "fit", "evaluate", "predict"),
    [
        ({}, ALL, ALL, ALL),
        ({"weights": "sharded"}, ALL, ALL, ALL),
        (
            {"weights": "sharded", "shard_over": "process"},
            *[(4, 4, 4, 1)] * 3,
        ),
        ({"sync_every": 8}, (4, 4, 1, 1), ALL, ALL),
        ({"batches": "each"}, ALL, ALL, OWN),
        ({"workers": True}, *[(4, 4, 1, 1)] * 3),
        ({"workers": True, "batches": "each"}, OWN, OWN, OWN),
    ],
)
def test_who_takes_part(options, fit, evaluate, predict):
    for kinds, wanted in [
        (["fit", "train_on_batch"], fit),
        (["evaluate", "test_on_batch"], evaluate),
        (["predict", "predict_on_batch"], predict),
    ]:
        for kind in kinds:
            assert sizes(places(kind, **options)) == wanted
    assert sizes(places(**options).alone()) == (1, 1, 1, 1)


def test_a_job_of_one_process_is_alone():
    config = kt.TowerStrategy(3)._config
    assert sizes(config.places("fit")) == (1, 1, 1, 1)


def test_towers_are_numbered_over_those_that_share_a_batch():
    assert (places().replicas, places().first_tower) == (12, 6)
    own = places("predict", batches="each")
    assert (own.replicas, own.first_tower) == (3, 0)
