"""Options of strategies: how they are taken, and which cannot be."""

import dataclasses
import inspect

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit import options as lib
from keras_towers.strategies import modes

Options = lib.StrategyOptions


def test_keywords_are_the_fields_of_options():
    fields = {f.name: f.type for f in dataclasses.fields(Options)}
    for keywords in (lib.RankKeywords, lib.ServerKeywords):
        for name, annotation in keywords.__annotations__.items():
            assert annotation.__forward_arg__ == fields[name], name


@pytest.mark.parametrize(
    ("strategy", "keywords"),
    [
        (kt.TowerStrategy, lib.AllReduceKeywords),
        (kt.ParameterServerTowerStrategy, lib.StepKeywords),
        (kt.DistributedReplicatedStrategy, lib.ServerKeywords),
        (kt.DistributedParameterServerStrategy, lib.ServerKeywords),
    ],
)
def test_help_explains_each_option(strategy, keywords):
    documented = inspect.getdoc(strategy)
    for name in keywords.__annotations__:
        assert f"\n    {name}: " in documented
    assert "compression" not in documented


@pytest.mark.parametrize(
    "strategy",
    [kt.HorovodStrategy, kt.BytePSStrategy, kt.MultiWorkerTowerStrategy],
)
def test_help_of_ranks_adds_options_to_those_of_towers(strategy):
    documented = inspect.getdoc(strategy)
    added = set(lib.RankKeywords.__annotations__)
    for name in added.difference(lib.AllReduceKeywords.__annotations__):
        assert f"\n    {name}: " in documented
    assert "the options of ``TowerStrategy``" in documented


Tower, Replicas = kt.TowerStrategy, kt.SyncReplicasStrategy
Servers = kt.ParameterServerTowerStrategy
BACKUP = {"replicas_to_aggregate": 2, "total_num_replicas": 2}
SHARDS = {"weights": "sharded"}
MAP = keras.distribution.LayoutMap(None)
ALL_MODES = ", ".join(map(repr, modes.MODES))


@pytest.mark.parametrize(
    "strategy, arguments, message",
    [
        (Options, {"compression": "zip"}, "'zip'.*-feedback'.*function"),
        (Options, {"scale_gradient": None}, "scale_gradient=None"),
        (Options, {"stall_timeout_s": float("nan")}, "timeout_s=nan"),
        (Options, {"stall_timeout_s": True}, "stall_timeout_s=True"),
        (Options, {"sync_every": 0}, "sync_every=0 .* 1 or more"),
        (Options, {"sync_every": True}, "=True .* a whole number or N"),
        (Options, {"shard_over": "process"}, "only applies with weights="),
        (Options, {"shard_over": "rank", **SHARDS}, "'job' or 'process'"),
        (Options, {"layouts": {}}, "a LayoutMap or None"),
        # docs/test_pairs.py has the others that contradict each other.
        (Options, {"layouts": MAP, "updates": "once"}, "updates='once'"),
        (Options, {"outer_momentum": 0.9}, "such as sync_every=16"),
        (Options, {"sync_every": 2, "outer_momentum": 1}, "=1 .* less"),
        (Options, {"outer_learning_rate": "1"}, "rate='1' .* a number"),
        (Tower, {"towers": 0}, "0"),
        (Tower, {"packer": 8}, "packer=8 .* a GradientPacker, True, False, or"),
        (Tower, {"mode": "NCCL"}, f"'NCCL' .*{ALL_MODES}, a function, or None"),
        (Tower, {"batches": "all"}, "batches='all' .*'each'"),
        (Tower, {"micro_batches": 0}, "micro_batches=0 .* 1 or more"),
        (Tower, {"micro_batches": "many"}, "micro_batches='many' .* 'auto'"),
        (Tower, {"updates": ["each"]}, r"updates=\['each'\] .*'each'"),
        (Tower, {"weights": "parts"}, "weights='parts' .*'whole'"),
        (Tower, {"sync_every_epoch": 2}, "sync_every_epoch=2"),
        (Tower, {"gather_bytes": 10}, "only applies with weights="),
        (Tower, {"gather_bytes": -1, **SHARDS}, "gather_bytes=-1"),
        (Tower, {"gather_bytes": "256", **SHARDS}, "='256'.* its unit"),
        (Tower, {"gather_bytes": 2.5, **SHARDS}, "a whole number, a text, or"),
        (Tower, {"average": 1}, "average=1 .*True.*False"),
        (Tower, {"batch_norm": "none"}, "batch_norm='none' .*'global'"),
        (kt.NoOpStrategy, {"logs": ["loss"]}, "logs=.* dictionary"),
        (Servers, {"ps_device": "tpu"}, "'host', 'towers'"),
        (Replicas, {"replicas_to_aggregate": 0}, "in an update, 1 or more"),
        (Replicas, {"replicas_to_aggregate": 2.0}, "=2.0 .* a whole number"),
        (Replicas, {"replicas_to_aggregate": True}, "=True .* a whole number"),
        (Replicas, {**BACKUP, "replicas_to_aggregate": 5000}, "too many"),
        (Replicas, {"total_num_replicas": 99}, "99"),
        (Replicas, {"total_num_replicas": 0}, "0"),
        (Replicas, {**BACKUP, "towers": 3}, "there are 3 towers"),
        (Replicas, {"variable_averages": 0.9}, "ExponentialMovingAverage"),
        (Replicas, {"tokens": "each"}, "tokens='each'"),
        (Replicas, {"stall_timeout_s": 0}, "stall_timeout_s=0"),
        (Replicas, {"batches": "split"}, "batches='split'"),
    ],
)
def test_values_that_are_not_allowed_are_refused(strategy, arguments, message):
    with pytest.raises(kt.TowerError, match=message):
        strategy(**arguments)


@pytest.mark.parametrize("divides", ["weights", "updates"])
def test_shards_within_a_process_leave_sums_over_ranks_to_others(divides):
    Options(**{divides: "sharded"}, shard_over="process", sync_every=2)
    Options(**{divides: "sharded"}, shard_over="process", compression="bf16")
    with pytest.raises(kt.TowerError, match='unless shard_over="process"'):
        Options(**{divides: "sharded"}, compression="bf16")


def test_numbers_may_be_those_of_numpy():
    two, half = np.int64(2), np.float32(0.5)
    Options(micro_batches=two, sync_every=two, outer_momentum=half)
    Options(stall_timeout_s=two)
    Options(stall_timeout_s=half)
    with pytest.raises(kt.TowerError, match="whole number"):
        Options(micro_batches=half)


def test_unknown_options_are_refused_with_those_there_are():
    with pytest.raises(
        kt.TowerError, match=r"TowerStrategy .*'bogus'\. .* towers, .*packer"
    ):
        kt.TowerStrategy(bogus=1)
    with pytest.raises(kt.TowerError, match="has no option 'compression'"):
        kt.TowerStrategy(compression="fp16")


@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: kt.TowerStrategy(1, avrage=True), "average"),
        (lambda: kt.strategy("tower", tower=1), "towers"),
        (lambda: kt.strategy("async", scale_gradeint=1), "scale_gradient"),
        (lambda: kt.strategy("horvod"), "horovod"),
        (lambda: kt.HorvodStrategy, "HorovodStrategy"),
    ],
)
def test_unknown_names_suggest_the_nearest(make, nearest):
    with pytest.raises(
        (kt.TowerError, AttributeError), match=rf"Did you mean '{nearest}'\?"
    ):
        make()


def test_an_ending_that_names_share_is_no_reason_to_suggest_one():
    with pytest.raises(AttributeError, match="'MirroredStrategy'$"):
        _ = kt.MirroredStrategy
