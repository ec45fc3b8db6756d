"""TensorFlow's own runtime: tasks of ``TF_CONFIG``, and collectives."""

from keras_towers.engines import Engine

ENGINE = Engine(
    name="runtime",
    title="TensorFlow",
    strategy="multi-worker",
    strategy_class="MultiWorkerTowerStrategy",
    roles=("worker",),
    after_keras="tensorflow_task:prepare",
)
