"""Search with KerasTuner on towers, and log each trial to MLflow.

``python examples/mlflow_keras_tuner.py``; needs keras-tuner and mlflow. Neither
knows of towers: the block is around the search.
"""

import keras
import keras_tuner
import mlflow
import numpy as np

import keras_towers as kt

kt.virtual_towers(2)  # splits the CPU; leave it out with GPUs

x = np.random.default_rng(0).random((512, 20), "float32")
y = x.sum(axis=1, keepdims=True)


class Search(keras_tuner.HyperModel):
    def build(self, hp):
        model = keras.Sequential(
            [
                keras.Input((20,)),
                keras.layers.Dense(hp.Int("units", 8, 64, step=8), "relu"),
                keras.layers.Dense(1),
            ]
        )
        rate = hp.Choice("rate", [1e-3, 1e-2])
        model.compile(keras.optimizers.Adam(rate), "mse")
        return model

    def fit(self, hp, model, *args, **kwargs):
        with mlflow.start_run(run_name="trial"):
            mlflow.log_params(hp.values)
            return model.fit(*args, **kwargs)


mlflow.tensorflow.autolog(log_models=False)
tuner = keras_tuner.RandomSearch(
    Search(), objective="val_loss", max_trials=3, seed=1, overwrite=True
)
with kt.TowerStrategy():  # the only line that knows of towers
    tuner.search(x, y, epochs=3, validation_split=0.25, verbose=0)

print(f"best: {tuner.get_best_hyperparameters()[0].values}")
for run in mlflow.search_runs(output_format="list"):
    loss = run.data.metrics["val_loss"]
    print(f"{run.data.params['units']} units: {loss:.4f}")
