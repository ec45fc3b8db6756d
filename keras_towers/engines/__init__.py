"""The engines that connect the processes of a job, a folder for each.

The rest of the package knows an engine by the protocol ``Transport``, which its
strategy hands on, and by the record ``ENGINE`` of its folder. Nothing else
imports these folders: to remove an engine, remove its folder, its name here
and what ``keras_towers/__init__.py`` lists of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass
from typing import Any

from keras_towers.errors import TowerError

_NAMES = (
    "byteps",
    "horovod",
    "runtime",
)


@dataclass(frozen=True)
class Engine:
    """What the rest of the package needs to know about an engine.

    What is described as a reference is ``module:name`` in the engine's folder,
    and imported when it is needed; an empty one: the engine has none.

    Attributes:
        name: the name of its folder; if it has to be built, of its package.
        title: its name in messages.
        strategy: the name of its strategy.
        strategy_class: the class of that strategy in ``keras_towers``.
        roles: the roles in TF_CONFIG of a job over it; empty: it reads none.
        module: the module by which a script may use the engine itself.
        transport: a reference to what connects this process and returns its
            ``Transport``; empty: that takes more than the environment says.
        recipe: a reference to the ``Recipe`` that builds it.
        servers: a reference to the processes that run beside the ranks.
        after_keras: a reference to what is called when Keras is imported.
    """

    name: str
    title: str
    strategy: str
    strategy_class: str
    roles: tuple[str, ...] = ()
    module: str = ""
    transport: str = ""
    recipe: str = ""
    servers: str = ""
    after_keras: str = ""

    @property
    def advice(self) -> str:
        """How to connect processes with it: the words after "--strategy"."""
        return f"{self.strategy}, or use kt.{self.strategy_class}()"

    def load(self, reference: str) -> Any:
        """Import the object that a reference names."""
        return pkgutil.resolve_name(f"{__name__}.{self.name}.{reference}")

    def check_installed(self) -> None:
        """Raise the error of every rank now, if the package is missing."""
        if importlib.util.find_spec(self.name) is None:
            raise TowerError(
                f"{self.title} is not installed in this environment: run "
                f"`keras-towers install {self.name}`."
            )


def find(name: str) -> Engine:
    """Find an engine by name."""
    if name not in ENGINES:
        raise TowerError(
            f"the engine {name!r} is not part of this keras_towers: its folder "
            f"keras_towers/engines/{name} is missing. There are "
            f"{', '.join(ENGINES)}."
        )
    return ENGINES[name]


def engine_of_job(servers: int | None) -> Engine:
    """The engine of a job with this number of servers, or none."""
    if not servers:
        return find("horovod")
    for engine in ENGINES.values():
        if engine.servers:
            return engine
    raise TowerError("no engine of this keras_towers has servers")


ENGINES: dict[str, Engine] = {
    name: importlib.import_module(f"{__name__}.{name}").ENGINE
    for name in _NAMES
    if importlib.util.find_spec(f"{__name__}.{name}")
}
"""The engines that are there, by name."""
