"""Towers of several devices, which divide each layer: tensor parallelism."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import keras
import numpy as np

from keras_towers import devices as devices_lib
from keras_towers._notices import announce, first_time
from keras_towers.errors import TowerError
from keras_towers.fit.contract import TowerConfig
from keras_towers.fit.options import (
    MeshKeywords,
    StrategyOptions,
    options_of,
)
from keras_towers.fit.update.in_shards import UpdateInShards
from keras_towers.fit.weights.model_state import output_paths
from keras_towers.partition.layouts import InShards, MeshLayout
from keras_towers.strategies.base import BaseStrategy

logger: logging.Logger = logging.getLogger("keras_towers")


class OnMesh(BaseStrategy):
    """A strategy on the mesh of a layout map.

    Args:
        layout_map: how weights are divided.
        batch_dim_name: the axis of the batch; None: the first.
        options: as for ``TowerStrategy``.
        devices_of: returns the devices of names; for a plan they need not
            exist.
    """

    def __init__(
        self,
        layout_map: keras.distribution.LayoutMap,
        batch_dim_name: str | None,
        options: StrategyOptions,
        devices_of: Callable[[list[str]], Sequence[str]],
    ):
        rows, axes = _rows_of(layout_map.device_mesh, batch_dim_name)
        mesh = [devices_of(row) for row in rows]
        devices_of([*itertools.chain(*mesh)])
        super().__init__(
            [row[0] for row in mesh],
            options,
            other_columns=[row[1:] for row in mesh],
        )
        layouts = _Layouts(layout_map, axes, mesh)
        self._compose(
            _UpdateOnMesh(self._config, layouts, lambda: self._adoption.models)
        )


class ModelParallelStrategy(OnMesh):
    """Trains a model on a mesh of devices, which divides weights as well.

    A row of the mesh is a tower: towers share the examples of each batch. The
    devices of a tower share the weights that a ``keras.distribution.LayoutMap``
    divides, the state of the optimizer for them, and what is computed with
    them: the pair of dense layers of a transformer, or the heads of attention,
    without gathering a kernel. Results are the same as on one device.

    ``keras.distribution.set_distribution(keras.distribution.ModelParallel(...))``
    trains on the same strategy, so scripts for other backends of Keras run as
    they are.

    Ports the tensor parallelism of Megatron-LM (Shoeybi et al., arXiv
    1909.08053), for layouts that the user chooses, as in GSPMD (arXiv
    2105.04663).

    Args:
        layout_map: how weights are divided over the axes of its mesh of one or
            two axes. An axis of a weight may name either of them: the one of
            the batch divides it over towers, as ``weights="sharded"`` does.
        batch_dim_name: the axis of the mesh that divides batches; None: the
            first.
        gather_bytes: how many bytes of weights that towers divide each has
            gathered at a time.
        **options: as for ``TowerStrategy``.

    Raises:
        TowerError: the mesh has more than two axes, unknown devices, or a
            layout does not fit a weight.

    Example:
        >>> devices = keras.distribution.list_devices()
        >>> mesh = keras.distribution.DeviceMesh(
        ...     (2, 4), ("batch", "model"), devices
        ... )
        >>> layouts = keras.distribution.LayoutMap(mesh)
        >>> layouts[".*ffn_up.*kernel"] = (None, "model")
        >>> layouts[".*ffn_down.*kernel"] = ("model", None)
        >>> with keras_towers.ModelParallelStrategy(layouts):
        ...     model.fit(x, y)
    """

    def __init__(
        self,
        layout_map: keras.distribution.LayoutMap,
        batch_dim_name: str | None = None,
        **options: Unpack[MeshKeywords],
    ):
        checked = options_of(self, MeshKeywords, options, weights="sharded")
        if not isinstance(layout_map, keras.distribution.LayoutMap):
            raise TowerError(
                f"layout_map={layout_map!r} is not allowed: give a "
                "keras.distribution.LayoutMap."
            )
        super().__init__(
            layout_map, batch_dim_name, checked, devices_lib.devices_of
        )


def _rows_of(
    mesh: Any, batch_dim_name: str | None
) -> tuple[list[list[str]], list[str]]:
    """Return the rows of a mesh, and the names of their axes.

    Args:
        mesh: a ``keras.distribution.DeviceMesh``.
        batch_dim_name: the axis of the batch.
    """
    names = [*mesh.axis_names]
    batch = batch_dim_name or names[0]
    if len(names) > 2 or batch not in names:
        raise TowerError(
            f"a mesh of the axes {', '.join(map(repr, names))} whose batch "
            f"axis is {batch!r} is not supported: give a DeviceMesh of one or "
            "two axes, one of which is that of the batch."
        )
    devices = np.asarray(mesh.devices)
    if len(names) == 1:
        return [[str(name)] for name in devices], names
    if names[1] == batch:
        devices, names = devices.T, names[::-1]
    return [[str(name) for name in row] for row in devices], names


class _UpdateOnMesh(UpdateInShards):
    """Every device updates its part of what a layout map divides.

    Args:
        config: the towers.
        layouts: how variables are divided.
        models: returns the models on the towers.
    """

    name = "mesh"

    def __init__(
        self,
        config: TowerConfig,
        layouts: _Layouts,
        models: Callable[[], Iterable[keras.Model]],
    ):
        super().__init__(config, True, layouts)
        self._layouts = layouts
        self._models = models

    def make_ready(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build the optimizer, and name the keys that no weight matches."""
        super().make_ready(optimizer, variables)
        outputs = {
            path for model in self._models() for path in output_paths(model)
        }
        unused = self._layouts.unused
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
                _quoted(mistaken),
            )


def _matches(key: str, paths: Iterable[str]) -> bool:
    """Whether a key of a layout map matches one of some paths."""
    return any(key == path or re.fullmatch(key, path) for path in paths)


def _quoted(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys))


class _Layouts:
    """How a layout map divides the variables of Keras.

    Args:
        layout_map: the layout map.
        axes: the names of the axes of towers and of columns.
        mesh: for each tower, the devices of its columns.
    """

    def __init__(
        self,
        layout_map: keras.distribution.LayoutMap,
        axes: Sequence[str],
        mesh: Sequence[Sequence[str]],
    ):
        self._layout_map = layout_map
        self._axes = axes
        self._paths: set[str] = set()
        self._sizes = {axes[0]: len(mesh)}
        if len(axes) > 1:
            self._sizes[axes[1]] = len(mesh[0])

    @property
    def unused(self) -> list[str]:
        """The keys that match the path of no variable so far."""
        return [
            key for key in self._layout_map if not _matches(key, self._paths)
        ]

    def __call__(
        self, variable: keras.Variable, shape: Sequence[int]
    ) -> MeshLayout | None:
        """Return how a variable is divided; None: it is whole.

        Args:
            variable: the variable, whose value may not exist yet.
            shape: its shape.

        Raises:
            TowerError: its layout does not fit its shape.
        """
        path = variable.path
        self._paths.add(path)
        found = getattr(variable, "_layout", None) or self._layout_map[path]
        names = () if found is None else tuple(found.axes)
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
        if not parts:
            return None
        first, *others = self._axes
        columns = parts.get(others[0]) if others else None
        return MeshLayout(parts.get(first), columns)
