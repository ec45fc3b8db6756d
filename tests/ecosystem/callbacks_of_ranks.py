"""A worker: callbacks of other packages over two ranks, on the chief alone."""

import os
import pathlib
import sys

import keras

from keras_towers.fit.weights import shards
from tests.kit.compare import assert_all_close
from tests.kit.ranks import check, main
from tests.processes import small as s

FOLDER = pathlib.Path(sys.argv[1])
# The models are small.
shards.SMALLEST_BYTES = 1
# No servers: what they log is files. Read when they are imported.
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
os.environ["GIT_PYTHON_REFRESH"] = "quiet"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["WANDB_DIR"] = str(FOLDER)


def train(*callbacks):
    """Train on the ranks, as one process does."""
    s.assert_as_one_process(
        s.eager(),
        lambda it: s.fit(it, epochs=2, callbacks=callbacks),
        reference=lambda it: s.fit(it, epochs=2),
    )


@check
def mlflow_logs_one_run():
    import mlflow

    mlflow.set_tracking_uri((FOLDER / "runs").as_uri())
    if s.RANK == 0:
        with mlflow.start_run() as run:
            train(mlflow.tensorflow.MlflowCallback(run))
        client = mlflow.MlflowClient()
        assert len(client.get_metric_history(run.info.run_id, "loss")) == 2
    else:
        train()
    # Autolog wraps ``fit``, and adds its callback.
    if s.RANK == 0:
        mlflow.tensorflow.autolog(log_models=False, checkpoint=False)
    with s.Strategy():
        s.fit(s.eager())
    s.gather("all have logged")
    if s.RANK == 0:
        mlflow.tensorflow.autolog(disable=True)
        assert len(mlflow.search_runs(output_format="list")) == 2


@check
def wandb_logs_one_run():
    import wandb
    from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

    if s.RANK == 0:
        with wandb.init(project="ranks"):
            saves = WandbModelCheckpoint(str(FOLDER / "saved.keras"))
            train(WandbMetricsLogger(), saves)
    else:
        train()
    s.gather("all have logged")
    assert len([*(FOLDER / "wandb").glob("offline-run-*")]) == 1
    assert (FOLDER / "saved.keras").exists()


@check
def tensorboard_logs_hyperparameters_once():
    from tensorboard.plugins.hparams import api

    if s.RANK == 0:
        train(api.KerasCallback(str(FOLDER / "of-board"), {"rate": 0.1}))
    else:
        train()
    s.gather("all have logged")
    assert (FOLDER / "of-board").exists()


@check
def orbax_writes_what_one_process_writes():
    """In the background, also with weights in shards, and within epochs."""
    from orbax.checkpoint import v1 as ocp

    def leaves(folder, step):
        path = FOLDER / folder / str(step)
        tree = ocp.load_checkpointables(path)["pytree"]
        return keras.tree.flatten(tree)

    def train_into(folder):
        saves = keras.callbacks.OrbaxCheckpoint(
            str(FOLDER / folder), max_to_keep=None
        )
        s.fit(s.model(optimizer="adam"), epochs=2, callbacks=[saves])

    for folder, options in ("whole", {}), ("in-shards", {"weights": "sharded"}):
        with s.Strategy(**options):
            train_into(folder)
        s.gather("all have written")
    if s.RANK == 0:
        train_into("alone")
        for step in range(2):
            wanted = leaves("alone", step)
            for folder in "whole", "in-shards":
                assert_all_close(leaves(folder, step), wanted, 1e-5)
    with s.Strategy(weights="sharded"):
        saves = keras.callbacks.OrbaxCheckpoint(
            str(FOLDER / "within"), save_freq=1
        )
        s.fit(s.model(optimizer="adam"), batch_size=10, callbacks=[saves])
    s.gather("all have written")
    if s.RANK == 0:
        assert [*(FOLDER / "within").iterdir()]


if __name__ == "__main__":
    s.Strategy()
    main()
