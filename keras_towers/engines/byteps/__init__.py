"""BytePS: its build, its transport, servers, strategy and drop-in."""

from keras_towers.engines import Engine

ENGINE = Engine(
    name="byteps",
    title="BytePS",
    strategy="byteps",
    strategy_class="BytePSStrategy",
    module="byteps.tensorflow",
    transport="byteps_transport:BytePSTransport",
    recipe="byteps_recipe:BytePS",
    servers="byteps_servers:Servers",
)
