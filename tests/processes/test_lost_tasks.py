"""Workers and parameter servers that stop, die, come back, or never start."""

import json
import re
import signal

import pytest

from tests.kit.compare import assert_close
from tests.kit.processes import wait_until
from tests.kit.sampling import sample_of
from tests.processes import lost

pytestmark = pytest.mark.slow
SYNC = "SyncReplicasStrategy"
OTHER = "DistributedReplicatedStrategy"
CACHED = "DistributedParameterServerStrategy"


@pytest.fixture
def cluster(tasks):
    """Makes clusters, and returns what starts their tasks."""

    def make(**sizes):
        clusters = tasks.cluster(**sizes)

        def start(strategy, fits, only=None, **given):
            given = {"options": {}, **given, "fits": fits}
            script = (
                "from tests.processes import lost\n"
                f"lost.main({strategy!r}, **{given!r})"
            )
            return [
                tasks.start(one, script)
                for number, one in enumerate(clusters)
                if only in (None, number)
            ]

        return start

    return make


def lines_of(task, word):
    """The rest of the lines of a task that begin with a word."""
    whole = task.out.rpartition("\n")[0]
    return [
        line.partition(" ")[2]
        for line in whole.splitlines()
        if line.split(" ")[0] == word
    ]


def go_on(*tasks, steps=5):
    """Wait until tasks have trained for some more steps."""
    before = [len(lines_of(task, "step")) for task in tasks]
    for task, known in zip(tasks, before, strict=True):
        assert wait_until(
            lambda task=task, known=known: (
                len(lines_of(task, "step")) >= known + steps
                or task.process.poll() is not None
            )
        )
        assert task.process.poll() is None, task.output


def ended(*tasks, code=0):
    for task in tasks:
        assert task.finish().code == code, task.output


def assert_values_of_one_device(task, *fits, backup=None, **options):
    (values,) = lines_of(task, "values")
    wanted = lost.train(lost.make(backup), fits, **options).get_weights()
    for one, other in zip(json.loads(values), wanted, strict=True):
        assert_close(one, other, 2e-5)


@pytest.mark.alternate(turn=5)
@pytest.mark.parametrize(
    "strategy, dies",
    sample_of([(SYNC, "dies_within"), (OTHER, "dies_after")]),
)
def test_worker_that_comes_back_goes_on_where_it_was(cluster, strategy, dies):
    """Within the second fit of the script, in the middle of an epoch."""
    start = cluster(ps=1, worker=2)
    arguments = {"options": {"stall_timeout_s": 60}, "pause_s": 0.05}
    fits = [1, 3]
    (server,) = start(strategy, fits, only=0, **arguments)
    (chief,) = start(strategy, fits, only=1, **arguments)
    death = {dies: 12 + 18, **arguments}
    (dead,) = start(strategy, fits, only=2, **death)
    ended(dead, code=-signal.SIGKILL)
    (again,) = start(strategy, fits, only=2, **arguments)
    ended(chief, again, server)
    assert lines_of(again, "epoch")[0] == lines_of(dead, "epoch")[-1]
    steps = [len(lines_of(task, "step")) for task in (chief, dead, again)]
    assert steps[:2] == [4 * 12, 12 + 18 - (dies == "dies_within")]
    assert steps[2] == 18
    if strategy == SYNC:
        assert "used by replica: 36 36; dropped: 0 0" in chief.output
    assert_values_of_one_device(chief, 1, 3)
    assert lines_of(chief, "values") == lines_of(again, "values")


@pytest.mark.long
def test_an_asynchronous_worker_that_comes_back_goes_on_where_it_was(cluster):
    start = cluster(ps=1, worker=2)
    arguments = {"options": {"sync": False}, "pause_s": 0.4}
    _, chief, dead = [
        *start(CACHED, [6], only=0, **arguments),
        *start(CACHED, [6], only=1, **arguments),
        *start(CACHED, [6], only=2, dies_after=18, **arguments),
    ]
    ended(dead, code=-signal.SIGKILL)
    (again,) = start(CACHED, [6], only=2, **arguments)
    ended(chief, again)
    assert lines_of(again, "epoch")[0] == lines_of(dead, "epoch")[-1]
    assert len(lines_of(again, "step")) == 6 * 12 - 18
    assert lines_of(chief, "values") == lines_of(again, "values")


SERVER, CHIEF, WORKER = range(3)
# By which of them is lost.
OPTIONS = {SERVER: {"towers": 2}, CHIEF: {}, WORKER: {"stall_timeout_s": 10}}
STALLS = (
    "worker 0 has waited 10 s for the other workers: worker 1 can no "
    "longer be reached"
)
NO_CHIEF = "the chief can no longer be reached"
NO_SERVER = "can no longer be reached. Start all tasks"


@pytest.mark.alternate(turn=1)
@pytest.mark.parametrize(
    "strategy, dies, witnesses, said",
    sample_of(
        [
            (SYNC, WORKER, [CHIEF], STALLS),
            (OTHER, CHIEF, [SERVER, WORKER], NO_CHIEF),
            (CACHED, SERVER, [CHIEF, WORKER], NO_SERVER),
        ],
        3,
    ),
)
def test_a_task_that_does_not_come_back_ends_all(
    cluster, strategy, dies, witnesses, said
):
    tasks = cluster(ps=1, worker=2)(
        strategy, [500], options=OPTIONS[dies], pause_s=0.05
    )
    go_on(tasks[CHIEF], tasks[WORKER])
    tasks[dies].kill()
    ended(*(task for task in tasks if task is not tasks[dies]), code=1)
    for task in witnesses:
        assert said in tasks[task].output


@pytest.mark.alternate(turn=0)
@pytest.mark.parametrize("kind", sample_of(["keras", "towers"]))
def test_a_job_whose_server_is_killed_goes_on_from_its_backup(
    cluster, kind, tmp_path
):
    """The backup is the chief's, whoever comes to the end of an epoch last."""
    start = cluster(ps=1, worker=2)
    backup = {"backup": kind, "folder": str(tmp_path / "backup")}
    backup["late_s"] = 0.2
    server, *workers = start(SYNC, [8], pause_s=0.1, **backup)
    assert wait_until(
        lambda: all("3" in lines_of(worker, "epoch") for worker in workers)
    )
    server.kill()
    ended(*workers, code=1)
    server, *workers = start(SYNC, [8], **backup)
    ended(*workers, server)
    for worker in workers:
        assert "1" not in lines_of(worker, "epoch")
        assert_values_of_one_device(worker, 8, backup=kind, shuffle=False)


@pytest.mark.long
def test_worker_that_comes_back_to_a_model_that_was_freed(cluster):
    start = cluster(ps=1, worker=2)
    arguments = {"models": 4, "pause_s": 0.1}
    *_, dies = start(SYNC, [8], **arguments)
    dies.wait_for("model 3", limit_s=400)
    dies.kill()
    (again,) = start(SYNC, [8], only=2, **arguments)
    ended(again, code=1)
    assert "the parameter servers have freed its weights" in again.output


@pytest.mark.alternate(turn=2)
@pytest.mark.parametrize(
    "number, victim, size",
    sample_of([(signal.SIGKILL, 0, 2), (signal.SIGSTOP, 1, 3)]),
)
def test_other_ranks_get_an_error_and_all_can_be_started_again(
    cluster, tmp_path, number, victim, size
):
    start = cluster(worker=size)
    arguments = {
        "options": {"heartbeat_timeout_s": 10},
        "backup": "keras",
        "folder": str(tmp_path / "backup"),
    }
    tasks = start("MultiWorkerTowerStrategy", [5], waits=victim, **arguments)
    # The victim waits to be killed, and the others wait for it.
    assert wait_until(
        lambda: all("3" in lines_of(task, "epoch") for task in tasks)
    )
    tasks[victim].process.send_signal(number)
    for task in tasks:
        if task is not tasks[victim]:
            ended(task)
            for word in "cause", "lost:":
                named = f"rank {victim} (127.0.0.1:"
                assert named in lines_of(task, word)[0]
            assert lines_of(task, "evaluated")
    tasks[victim].kill()
    tasks = start("MultiWorkerTowerStrategy", [5], **arguments)
    ended(*tasks)
    for task in tasks:
        assert "2" not in lines_of(task, "epoch")
        assert lines_of(task, "values") == lines_of(tasks[0], "values")
    assert_values_of_one_device(tasks[0], 5, backup="keras", shuffle=False)


FAILS = """
import time

from tests.kit.leaving import Boom
from tests.processes import lost

import keras_towers as kt


class Fails(lost.Report):
    def on_train_batch_end(self, batch, logs=None):
        if strategy.rank == 1 and batch == 2:
            # Until the other one waits for it.
            time.sleep(3)
            raise Boom("my bug")


with kt.MultiWorkerTowerStrategy() as strategy:
    lost.train(lost.make(), [1], [Fails()])
"""


@pytest.mark.alternate(turn=3)
def test_an_error_on_one_rank_is_told_by_the_others(tasks):
    """Also where ranks have nothing in common but TensorFlow's collectives."""
    first, second = [tasks.start(c, FAILS) for c in tasks.cluster(worker=2)]
    ended(first, second, code=1)
    said = "the call has ended, because it failed on rank 1: Boom: my bug"
    assert said in first.last and "Boom: my bug" in second.last


STARTS = """
import keras_towers as kt

try:
    kt.MultiWorkerTowerStrategy(start_timeout_s=6)
except kt.TowerError as error:
    print("refused:", error, flush=True)
"""


def test_a_worker_that_never_starts_is_named(tasks):
    _, second = tasks.cluster(worker=2)
    task = tasks.start(second, STARTS)
    ended(task)
    missing = f"rank 0 ({second.workers[0]})"
    assert f"waits for {missing} to start" in task.err
    said = f"refused: .*{re.escape(missing)} did not start within 6 seconds"
    assert re.search(said, task.out)
