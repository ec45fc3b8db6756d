"""Ray Train with two real workers, of which one is lost on the way."""

import os
import signal
from pathlib import Path

import keras
import psutil
import pytest

import keras_towers as kt
from tests.kit.compare import close
from tests.kit.training import X, Y, classifier
from tests.launching.jobs import all_gone

pytest.importorskip("ray.train", reason="Ray is not installed: make test-ray")

import ray.train

import keras_towers.ray as kt_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Ray on this machine, of which nothing is left."""
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)
    yield
    ray.shutdown()
    left = set(psutil.Process().children(recursive=True)) - before
    assert all_gone(list(left), 10)


def fit(model, *callbacks):
    return model.fit(X, Y, 8, 4, 0, callbacks=list(callbacks))


def built():
    keras.utils.set_random_seed(3)
    return classifier(keras.layers.Dropout(0.2))


def train(folder):
    worker = ray.train.get_context().get_world_rank()

    class Log(keras.callbacks.Callback):
        """Notes each epoch; worker 1 dies in the last one, once."""

        def on_epoch_begin(self, epoch, logs=None):
            with (folder / f"epochs-{worker}").open("a") as file:
                file.write(f"{epoch}\n")
            if (worker, epoch) == (1, 3) and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    model = built()
    with kt.HorovodStrategy() as strategy:
        history = fit(model, kt_ray.Report(every=2), Log()).history
    with pytest.raises(kt.TowerError, match="inside a strategy's block"):
        fit(model, kt_ray.Report())
    return {
        "place": strategy.rank - worker,
        "size": strategy.size,
        "address": os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].split(":")[0],
        "losses": history["loss"],
    }


def test_a_lost_worker_does_not_change_the_weights(cluster, tmp_path):
    result = kt_ray.TowerTrainer(
        train,
        train_loop_config=tmp_path,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(tmp_path / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    # Back to the last checkpoint.
    assert (tmp_path / "died").exists()
    epochs = (tmp_path / "epochs-1").read_text().split()
    assert epochs == ["0", "1", "2", "3", "2", "3"]

    wanted = built()
    expected = fit(wanted).history
    found = built()
    with result.checkpoint.as_directory() as folder:
        found.load_weights(Path(folder, kt_ray.WEIGHTS))
    for one, other in zip(found.weights, wanted.weights, strict=True):
        close(one, other)
    assert result.metrics["epoch"] == 3
    close(result.metrics["loss"], expected["loss"][3], 1e-5)
    said = result.return_value
    assert (said["place"], said["size"]) == (0, 2)
    assert said["address"] == "127.0.0.1"
    close(said["losses"], expected["loss"], 1e-5)
