"""Horovod: its build, its transport, strategy, elastic jobs and drop-in."""

from keras_towers.engines import Engine

ENGINE = Engine(
    name="horovod",
    title="Horovod",
    strategy="horovod",
    strategy_class="HorovodStrategy",
    module="horovod.tensorflow",
    transport="horovod_transport:HorovodTransport",
    recipe="horovod_recipe:Horovod",
)
