"""``examples/ray_train.py`` with two real workers, of which one is lost."""

import contextlib
import os
import signal

import keras
import psutil
import pytest

from tests.kit.compare import assert_close
from tests.kit.processes import all_gone

pytest.importorskip("ray.train", reason="Ray is not installed: make test-ray")

import ray.train

import keras_towers as kt
from examples import ray_train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(monkeypatch):
    """Ray on this machine, of which nothing is left."""
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)
    yield
    ray.shutdown()
    left = set(psutil.Process().children(recursive=True)) - before
    assert all_gone(list(left), 10)


def train_and_lose_worker_1(config):
    worker = ray.train.get_context().get_world_rank()
    died = os.path.join(config["folder"], "died")

    class ReportAndDie(ray_train.Report):
        """Notes each epoch; worker 1 dies in the last but one, once."""

        def on_epoch_begin(self, epoch, logs=None):
            path = os.path.join(config["folder"], f"epochs-{worker}")
            with open(path, "a") as file:
                file.write(f"{epoch} ")
            if (worker, epoch) == (1, 3) and not os.path.exists(died):
                open(died, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    ray_train.Report = ReportAndDie
    return ray_train.train(config)


def train_alone(folder, monkeypatch):
    """What the example trains to in one process."""

    class Context:
        get_world_rank = staticmethod(lambda: 0)
        get_world_size = staticmethod(lambda: 1)

    folder.mkdir()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ray.train, "get_context", Context)
    monkeypatch.setattr(ray.train, "report", lambda logs: None)
    monkeypatch.setattr(ray_train, "broadcast_from_rank_zero", lambda job: job)
    monkeypatch.setattr(kt, "Backup", lambda path: keras.callbacks.Callback())
    monkeypatch.setattr(kt, "HorovodStrategy", contextlib.nullcontext)
    history = ray_train.train({"folder": str(folder)})
    return history, keras.saving.load_model(folder / "model.keras")


def test_a_lost_worker_does_not_change_the_weights(
    cluster, tmp_path, monkeypatch
):
    result = ray_train.DataParallelTrainer(
        train_and_lose_worker_1,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(tmp_path / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    assert (tmp_path / "died").exists()
    assert (tmp_path / "epochs-1").read_text().split() == list("012334")

    history, expected = train_alone(tmp_path / "alone", monkeypatch)
    found = keras.saving.load_model(tmp_path / "model.keras")
    for one, other in zip(found.weights, expected.weights, strict=True):
        assert_close(one, other)
    assert_close(result.return_value["loss"], history["loss"], 1e-5)
