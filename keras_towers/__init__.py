"""Train an existing Keras model on many devices with one line around ``fit``.

>>> import keras_towers as kt
>>> with kt.TowerStrategy():
...     model.fit(x, y)
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

from keras_towers.foundation import import_hooks as _import_hooks
from keras_towers.foundation.errors import (
    CompatibilityError,
    TowerError,
    did_you_mean,
)
from keras_towers.jobs import known_engines as _known_engines

if TYPE_CHECKING:
    from keras_towers import extending
    from keras_towers.backups import elastic
    from keras_towers.backups.backup import Backup, load_backup
    from keras_towers.engines.byteps import bps as byteps  # noqa: F401
    from keras_towers.engines.byteps.byteps_strategy import BytePSStrategy
    from keras_towers.engines.horovod import hvd as horovod  # noqa: F401
    from keras_towers.engines.horovod.horovod_strategy import HorovodStrategy
    from keras_towers.engines.runtime.multi_worker import (
        MultiWorkerTowerStrategy,
    )
    from keras_towers.fit.calls.callback_roles import ChiefOnly, EveryRank
    from keras_towers.fit.calls.saving import save_on_every_rank
    from keras_towers.fit.current_tower import (
        CurrentTower,
        current_tower,
        run_on_each_tower,
    )
    from keras_towers.inspection.explanation import explain
    from keras_towers.inspection.recording.callback import Timeline
    from keras_towers.inspection.verification import verify
    from keras_towers.jobs.launching.function_job import launch
    from keras_towers.reduction.packing import GradientPacker
    from keras_towers.strategies import strategy
    from keras_towers.strategies.model_parallel import ModelParallelStrategy
    from keras_towers.strategies.noop import NoOpStrategy
    from keras_towers.strategies.parameter_server_strategies import (
        DistributedParameterServerStrategy,
        DistributedReplicatedStrategy,
        ParameterServerTowerStrategy,
    )
    from keras_towers.strategies.replica_strategies import (
        AsyncTowerStrategy,
        SyncReplicasStrategy,
    )
    from keras_towers.strategies.tower import TowerStrategy
    from keras_towers.transport.devices import virtual_towers

__version__ = "0.1.0"

__all__ = [
    "AsyncTowerStrategy",
    "Backup",
    "BytePSStrategy",
    "ChiefOnly",
    "CompatibilityError",
    "CurrentTower",
    "DistributedParameterServerStrategy",
    "DistributedReplicatedStrategy",
    "EveryRank",
    "GradientPacker",
    "HorovodStrategy",
    "ModelParallelStrategy",
    "MultiWorkerTowerStrategy",
    "NoOpStrategy",
    "ParameterServerTowerStrategy",
    "SyncReplicasStrategy",
    "Timeline",
    "TowerError",
    "TowerStrategy",
    "current_tower",
    "elastic",
    "explain",
    "extending",
    "launch",
    "load_backup",
    "run_on_each_tower",
    "save_on_every_rank",
    "strategy",
    "verify",
    "virtual_towers",
]

# Lazy: importing TensorFlow takes seconds, which `keras-towers --help` saves.
_NAMES_IN = {
    "transport.devices": "virtual_towers",
    "engines.byteps.byteps_strategy": "BytePSStrategy",
    "engines.horovod.horovod_strategy": "HorovodStrategy",
    "engines.runtime.multi_worker": "MultiWorkerTowerStrategy",
    "inspection.explanation": "explain",
    "fit.calls.callback_roles": "ChiefOnly EveryRank",
    "fit.calls.saving": "save_on_every_rank",
    "backups.backup": "Backup load_backup",
    "jobs.launching.function_job": "launch",
    "reduction.packing": "GradientPacker",
    "strategies": "strategy",
    "strategies.model_parallel": "ModelParallelStrategy",
    "strategies.noop": "NoOpStrategy",
    "strategies.parameter_server_strategies": (
        "DistributedParameterServerStrategy DistributedReplicatedStrategy "
        "ParameterServerTowerStrategy"
    ),
    "strategies.replica_strategies": "AsyncTowerStrategy SyncReplicasStrategy",
    "strategies.tower": "TowerStrategy",
    "inspection.recording.callback": "Timeline",
    "fit.current_tower": "CurrentTower current_tower run_on_each_tower",
    "inspection.verification": "verify",
}
# Modules, which ``import keras_towers.horovod as hvd`` finds, too.
_MODULES = {
    "elastic": "backups.elastic",
    "byteps": "engines.byteps.bps",
    "byteps.callbacks": "engines.byteps.bps.callbacks",
    "horovod": "engines.horovod.hvd",
    "horovod.callbacks": "engines.dropin.horovod_callbacks",
    "horovod.elastic": "engines.horovod.hvd.elastic_states",
}
_ROOMS = ("extending",)


if not TYPE_CHECKING:  # Checkers know the names from the imports above.

    def __getattr__(name: str) -> Any:
        if home := _home_of(name):
            globals()[name] = value = getattr(_import(home), name)
            return value
        if name in (*_MODULES, *_ROOMS):  # The import puts it here.
            return _import(name)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}"
            f"{did_you_mean(name, [*__all__, *_MODULES])}"
        )


def _home_of(name: str) -> str | None:
    """Return the module of a public name, without importing it."""
    homes = (home for home, names in _NAMES_IN.items() if name in names.split())
    return next(homes, None)


def _import(module: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{module}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _connect() -> None:
    """Prepare the engines, and connect ``keras.distribution``."""
    import keras

    if keras.backend.backend() != "tensorflow":
        return
    try:
        from keras_towers.strategies import keras_distribution

        for engine in _known_engines.ENGINES.values():
            if engine.after_keras:
                engine.load(engine.after_keras)()
        keras_distribution.connect()
    except (ImportError, AttributeError) as error:
        # Keras itself has to be importable with any version.
        logging.getLogger("keras_towers").warning(
            "keras.distribution is not connected to towers, and trains on one "
            f"device: {error}"
        )


_import_hooks.find_modules(
    {
        f"{__name__}.{name}": f"{__name__}.{home}"
        for name, home in _MODULES.items()
    }
    # Scripts written for an engine run as they are.
    | {
        own: f"{__name__}.{engine.name}"
        for engine in _known_engines.ENGINES.values()
        for own in engine.keras_modules
    },
    _known_engines.announce_drop_in,
)
_import_hooks.after_keras(_connect)
