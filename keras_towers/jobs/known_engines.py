"""The engines by name, and the choice of one for a job.

A strategy names its engine (``STRATEGIES``). For a script without a strategy,
``keras-towers run`` asks ``choose``. The modules of an engine are imported only
when it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import announce, first_time

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Engine:
    """An engine, as the rest of the package knows it.

    A reference is ``module:name``, with a module of the engine's folder that is
    imported when it is needed. An empty reference means that the engine has no
    such part.

    Attributes:
        name: the name of its folder, and of its package if it has to be built.
        title: its name in messages.
        strategy: the name of its strategy.
        strategy_class: the class of this strategy in ``keras_towers``.
        roles: the roles of its tasks in TF_CONFIG, if it reads that.
        module: the module with which a script may use the engine itself.
        keras_modules: its own modules for Keras, whose imports give the drop-in
            ``keras_towers.<name>`` instead.
        transport: a reference to a function that connects this process and
            returns its ``Transport``; empty: it would need arguments.
        messages: a reference to a function for ``AbsentRanks``: the memory of
            an exchange; empty: that of most engines; None: it is not known
            before steps run.
        recipe: a reference to the ``Recipe`` that builds it.
        servers: a reference to the class of the servers of a job.
        after_keras: a reference to a function to call when Keras is imported.
    """

    name: str
    title: str
    strategy: str
    strategy_class: str
    roles: tuple[str, ...] = ()
    module: str = ""
    keras_modules: tuple[str, ...] = ()
    transport: str = ""
    messages: str | None = ""
    recipe: str = ""
    servers: str = ""
    after_keras: str = ""
    names: str = "{}"

    @property
    def serves(self) -> bool:
        """Whether the variables of its jobs are on servers."""
        return "ps" in self.roles

    def load(self, reference: str) -> Any:
        """Import the object that a reference names."""
        if not reference.startswith("keras_towers."):
            reference = f"keras_towers.engines.{self.name}.{reference}"
        return pkgutil.resolve_name(reference)

    def check_installed(self) -> None:
        """Raise an error before any rank does, if the package is missing."""
        if not self.module:
            return
        spec = importlib.util.find_spec(self.name)
        if spec is None:
            raise TowerError(
                f"{self.title} is not installed in this environment: run "
                f"`keras-towers install {self.name}`."
            )
        if spec.submodule_search_locations is None:
            # Importing a script of that name would run it a second time.
            raise TowerError(
                f"{self.title} is hidden by {spec.origin}, which has its "
                "name: rename that file."
            )

    def import_module(self) -> ModuleType:
        """Import ``module``, or raise an error that says what to do."""
        import tensorflow as tf

        self.check_installed()
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError:
            raise
        except (ImportError, OSError, tf.errors.NotFoundError) as error:
            reason = str(error).strip().splitlines()[0]
            raise TowerError(
                f"{self.title} does not load with TensorFlow "
                f"{tf.__version__}; it was probably built for another version, "
                "or on another machine: run `keras-towers install "
                f"{self.name}` to build it for this one. (The error was: "
                f"{reason})"
            ) from error


BYTEPS: Engine = Engine(
    name="byteps",
    title="BytePS",
    strategy="byteps",
    strategy_class="BytePSStrategy",
    module="byteps.tensorflow",
    keras_modules=("byteps.keras", "byteps.tensorflow.keras"),
    transport="byteps_transport:BytePSTransport",
    messages=None,
    recipe="byteps_recipe:BytePS",
    servers="byteps_servers:Servers",
)
HOROVOD: Engine = Engine(
    name="horovod",
    title="Horovod",
    strategy="horovod",
    strategy_class="HorovodStrategy",
    module="horovod.tensorflow",
    keras_modules=("horovod.keras", "horovod.tensorflow.keras"),
    transport="horovod_transport:HorovodTransport",
    recipe="horovod_recipe:Horovod",
)
RUNTIME: Engine = Engine(
    name="runtime",
    title="TensorFlow",
    strategy="multi-worker",
    strategy_class="MultiWorkerTowerStrategy",
    roles=("worker",),
    messages="collective_transport:message_bytes",
    after_keras="tensorflow_task:prepare",
)

SERVED: Engine = Engine(
    name="parameter_servers",
    title="TensorFlow",
    strategy="sync-replicas",
    strategy_class="SyncReplicasStrategy",
    roles=("worker", "ps"),
    servers="keras_towers.parameter_servers.server_tasks:Servers",
    names="worker {}",
)

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (BYTEPS, HOROVOD, RUNTIME)
}
"""The engines by name."""


def choose(ps: int | None, workers: int | None, servers: int | None) -> Engine:
    """Return the engine of a job whose strategy does not name one.

    Args:
        ps: the number of parameter servers.
        workers: the number of TensorFlow's tasks that train.
        servers: the number of BytePS's servers.
    """
    if ps:
        return SERVED
    if workers:
        return RUNTIME
    return BYTEPS if servers else HOROVOD


def announce_drop_in(module: str) -> None:
    """Say on rank 0, once, that an engine's own module is the drop-in."""
    # Not needed to import the package.
    from keras_towers.jobs.rendezvous import launchers

    engine, rank = ENGINES[module.partition(".")[0]], launchers.detect()
    if first_time(engine, "drop-in") and not (rank and rank.rank):
        announce(
            f"`import {module}` gives keras_towers.{engine.name}: the module "
            f"of {engine.title} itself does not work with Keras 3."
        )


def refuse_own_optimizer(optimizer: keras.Optimizer) -> None:
    """Raise an error if an engine's own module has made an optimizer."""
    package, _, module = type(optimizer).__module__.partition(".")
    engine = ENGINES.get(package)
    if engine and module == "_keras":
        names = " or ".join(engine.keras_modules)
        raise TowerError(
            f"the optimizer {optimizer.name!r} comes from {engine.title}'s "
            "own DistributedOptimizer, which exchanges nothing on Keras 3: "
            "each process would train its own model. Import keras_towers "
            f"before {names}: you then get keras_towers.{engine.name}."
        )
