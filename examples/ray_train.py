"""The workers of Ray Train as ranks; goes on where one is lost.

Needs ``pip install 'ray[train]>=2.60'`` and ``keras-towers install horovod``.
"""

import os
import tempfile
import uuid

import keras
import numpy as np
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import keras_towers as kt


class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        ray.train.report({"epoch": epoch, **logs})


def train(config):
    context = ray.train.get_context()
    # A new name each time that Ray starts the workers, also after a loss.
    job = broadcast_from_rank_zero(uuid.uuid4().hex)
    os.environ["KERAS_TOWERS_JOB"] = job
    os.environ["KERAS_TOWERS_RENDEZVOUS_FOLDER"] = config["folder"]
    os.environ["KERAS_TOWERS_RANK"] = str(context.get_world_rank())
    os.environ["KERAS_TOWERS_SIZE"] = str(context.get_world_size())
    # Ray shows each worker the GPUs that are its own.
    os.environ["KERAS_TOWERS_OWN_GPUS"] = "1"
    keras.utils.set_random_seed(1)
    x = np.random.rand(1000, 20).astype("float32")
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile("adam", "mse")
    backup = kt.Backup(os.path.join(config["folder"], "backup"))
    with kt.HorovodStrategy():
        history = model.fit(
            x, x.sum(axis=1), epochs=5, verbose=0, callbacks=[backup, Report()]
        )
    if context.get_world_rank() == 0:
        model.save(os.path.join(config["folder"], "model.keras"))
    return history.history


if __name__ == "__main__":
    # With several machines: a folder that all of them see.
    with tempfile.TemporaryDirectory() as folder:
        failures = ray.train.FailureConfig(max_failures=1)
        trainer = DataParallelTrainer(
            train,
            train_loop_config={"folder": folder},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(failure_config=failures),
        )
        print("losses:", trainer.fit().return_value["loss"])
