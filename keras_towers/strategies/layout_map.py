"""Divides weights over a mesh as Keras's ``LayoutMap`` says.

Slots are divided like their weights, by ``fit/update/weight_update.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.components import TowerConfig
from keras_towers.fit.update.sharding_policy import ShardedOverTowers
from keras_towers.fit.weights.model_state import output_paths
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import announce, first_time, logger
from keras_towers.partition.ir.layouts import REPLICATED, InShards, MeshLayout
from keras_towers.strategies.device_mesh import Mesh


def _matches(key: str, paths: Iterable[str]) -> bool:
    """Whether a key of a layout map matches one of some paths, for Keras."""
    alone = keras.distribution.LayoutMap(None)
    alone[key] = ()
    return any(alone[path] is not None for path in paths)


def _quoted(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys))


class ShardedOverMesh(ShardedOverTowers):
    """How a layout map divides the variables of Keras over a mesh.

    Args:
        config: the towers.
        mesh: the mesh of this process.
        models: returns the models on the towers.
    """

    name = "mesh"

    def __init__(
        self,
        config: TowerConfig,
        mesh: Mesh,
        models: Callable[[], Iterable[keras.Model]],
    ):
        super().__init__(config, "layouts", True)
        self._models = models
        self._speaks: bool = config.transport.rank == 0
        self._layout_map, self._axes = mesh.layout_map, mesh.axes
        self._paths: set[str] = set()
        sizes = self.towers, len(mesh.rows[0])
        self._sizes = dict(zip(mesh.axes, sizes, strict=False))

    @property
    def description(self) -> str:
        """A short phrase for ``describe()``."""
        return "the layout map divides weights over the mesh"

    def announce(
        self, optimizer: Any, weights: Sequence[Any], divides: bool
    ) -> None:
        """Name the keys that no weight matches, once."""
        if not self._speaks:
            return
        outputs = {
            path for model in self._models() for path in output_paths(model)
        }
        unused = self._unused
        hints = [key for key in unused if _matches(key, outputs)]
        if hints and first_time(self, ("layouts of outputs", *hints)):
            announce(
                "these keys of the layout map are for outputs of layers: "
                f"{_quoted(hints)}. They are hints, and change nothing: the "
                "layouts of outputs follow from those of weights."
            )
        mistaken = [key for key in unused if key not in hints]
        said = "layouts that match nothing", *mistaken
        if mistaken and first_time(self, said):
            logger.warning(
                "these keys of the layout map match the path of no weight, and "
                "of no layer's output: %s. Weights that no key matches are "
                "whole on every tower. print([w.path for w in model.weights]) "
                "lists the paths.",
                ", ".join(map(self._describe_unused, mistaken)),
            )

    @property
    def _unused(self) -> list[str]:
        """The keys that match the path of no variable so far."""
        return [
            key for key in self._layout_map if not _matches(key, self._paths)
        ]

    def _describe_unused(self, key: str) -> str:
        """Describe a key, and how to write it if it matches a part of a path.

        Keras compares keys with whole paths.
        """
        for path in sorted(self._paths):
            if part := re.search(key, path):
                before = ".*" if part.start() else ""
                behind = ".*" if part.end() < len(path) else ""
                whole = f"{before}{key}{behind}"
                return f"{key!r} (write {whole!r} for {path!r})"
        return repr(key)

    def choose(
        self, variable: Any, shape: Sequence[int], dtype: tf.DType
    ) -> MeshLayout:
        """Return how a variable is divided; see ``ShardingPolicy``.

        Raises:
            TowerError: its layout does not fit its shape.
        """
        if not isinstance(variable, keras.Variable):
            return MeshLayout()
        path = variable.path
        self._paths.add(path)
        layout = getattr(variable, "_layout", None) or self._layout_map[path]
        names = () if layout is None else tuple(layout.axes)
        if len(names) > len(shape):
            raise TowerError(
                f"the layout {names} of weight {path!r} has "
                f"{len(names)} axes, but the weight has {len(shape)}: its "
                f"shape is {tuple(shape)}."
            )
        unknown = {*names} - {*self._axes, None}
        if unknown:
            raise TowerError(
                f"the layout {names} of weight {path!r} names axes that the "
                f"mesh does not have: its axes are {', '.join(self._axes)}."
            )
        parts: dict[str, InShards] = {}
        for axis, name in enumerate(names):
            if name is None:
                continue
            size, number = shape[axis], self._sizes[name]
            if names.count(name) > 1 or size % number:
                problem = (
                    "more than one axis of it has this name"
                    if names.count(name) > 1
                    else f"axis {axis} has {size} entries, which {number} "
                    "devices cannot share evenly"
                )
                raise TowerError(
                    f"the layout {names} of weight {path!r} of shape "
                    f"{tuple(shape)} cannot divide it over {name!r}: {problem}."
                )
            if number > 1:
                parts[name] = InShards(axis, size, size // number)
        first, *others = self._axes
        columns = parts.get(others[0]) if others else None
        return MeshLayout(parts.get(first, REPLICATED), columns)
