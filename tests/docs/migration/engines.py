"""Checks of the rows on Horovod and BytePS, of one process."""

import keras
import pytest

import keras_towers as kt
from keras_towers.meeting.environments import LAUNCHERS, dmlc
from keras_towers.strategies.options import Options
from tests.docs.migration import differ, fit, model, option, row, scripts
from tests.docs.test_commands import COMMANDS, check, options_of

HOROVOD, BYTEPS = "From Horovod", "From BytePS"
RUN = options_of(COMMANDS.commands["run"])


def made(row, index=0):
    pytest.importorskip("horovod")
    return row.made(index)


def command(row, index=0):
    check(row.here[index].split()[1:])


@row(HOROVOD, "`horovodrun -np 4 python train.py`")
def launcher(row):
    command(row)
    # It names its ranks; a job of it is a test of tests/docs/test_migration.py.
    names = [launcher.name for launcher in LAUNCHERS]
    assert "keras-towers run or horovodrun" in names


@row(HOROVOD, "`horovodrun -H host1:4,host2:4`")
def hosts(row):
    command(row)


@row(HOROVOD, "each rank reads its part of the data")
def own_data(row):
    assert option(made(row), "batches") == "each"
    assert option(kt.HorovodStrategy(), "batches") == "split"


@row(
    HOROVOD,
    "`DistributedOptimizer`, the broadcast callback, `MetricAverageCallback`",
)
def nothing_else_is_needed(row):
    pytest.importorskip("horovod")
    mine = model()
    with kt.HorovodStrategy():
        fit(mine)
    assert differ(mine, fit(model())) < 1e-6


@row(HOROVOD, "`op=hvd.Sum`")
def sums(row):
    assert made(row).average is False


@row(HOROVOD, "`if hvd.rank() == 0` around writing callbacks")
def writing_callbacks(row):
    callback = keras.callbacks.Callback()
    assert row.made(callback=callback)


@row(HOROVOD, "`hvd.rank()`, `size()`, `local_rank()`")
def places(row):
    pytest.importorskip("horovod")
    strategy = kt.HorovodStrategy()
    found = [row.made(index, strategy=strategy) for index in range(3)]
    assert found == [0, 1, 0]


@row(HOROVOD, "`compression=hvd.Compression.fp16`")
def compression(row):
    assert option(made(row), "compression") == "fp16"
    for name in row.here[1:]:
        if name != "...":
            assert kt.HorovodStrategy(compression=name.strip('"'))


@row(HOROVOD, "`backward_passes_per_step=4`", long=True)
def accumulation(row):
    pytest.importorskip("horovod")
    given = eval(f"dict({row.here[0]})")
    mine = model(optimizer=keras.optimizers.SGD(**given))
    with kt.HorovodStrategy():
        fit(mine, epochs=2)
    alone = model(optimizer=keras.optimizers.SGD(**given))
    assert differ(mine, fit(alone, epochs=2)) < 1e-6


@row(HOROVOD, "`hvd.SyncBatchNormalization`")
def batch_norm(row):
    assert option(made(row, 1), "batch_norm") == "global"


@row(HOROVOD, "`LearningRateWarmupCallback`")
def warm_up(row):
    pytest.importorskip("horovod")
    import keras_towers.horovod as hvd

    assert hvd.callbacks.LearningRateWarmupCallback(0.1)


@row(
    HOROVOD,
    "`hvd.elastic.KerasState`, `hvd.elastic.run`, `CommitStateCallback`",
)
def elastic(row):
    pytest.importorskip("horovod")
    assert all(callable(row.made(index)) for index in range(3))


@row(HOROVOD, "`HOROVOD_STALL_CHECK_TIME_SECONDS`")
def stalls(row):
    option = RUN[row.here[0]]
    assert option.envvar == row.there.strip("`")


@row(BYTEPS, "`import byteps.keras as bps`, `byteps.tensorflow.keras`")
def imports(row):
    # Importing it would make this process a worker: the page's script does.
    assert row.here == ("import keras_towers.byteps as bps",)


@row(BYTEPS, "`bpslaunch python train.py`")
def byteps_launcher(row):
    command(row)


WORKER = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
    "DMLC_WORKER_ID": "0",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "4000",
}


@row(
    BYTEPS,
    "`DMLC_ROLE`, `DMLC_NUM_WORKER`, ... for processes started by hand",
)
def by_hand(row):
    assert "worker 0 of 2" in dmlc.worker(WORKER)


@row(
    BYTEPS,
    "`DistributedOptimizer`, the broadcast callback, `MetricAverageCallback`",
)
def in_the_strategy(row):
    assert "BytePSStrategy()" in scripts()
    assert row.here == ("BytePSStrategy()",)


@row(BYTEPS, "`bps.push_pull(tensor)`")
def push_pull(row):
    assert all(callable(row.made(index)) for index in (1, 2))


@row(BYTEPS, "`compression=bps.Compression.fp16`")
def byteps_compression(row):
    given = row.here[0].partition("(")[2].rstrip(")")
    assert eval(f"Options({given})", {"Options": Options}).compression == "fp16"


@row(BYTEPS, "`byteps.tensorflow.distribute.MirroredStrategy`")
def byteps_distribute(row):
    assert row.here == ("BytePSStrategy()",)


@row(BYTEPS, "`BYTEPS_ENABLE_ASYNC=1`")
def asynchronous(row):
    name, value = row.there.strip("`").split("=")
    with pytest.raises(kt.TowerError, match=name):
        dmlc.worker({**WORKER, name: value})
    assert "sync=False" in row.here[0]
