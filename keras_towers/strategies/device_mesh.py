"""A mesh of devices in each process, whose columns divide weights.

Slots are divided like their weights, by ``fit/update/weight_update.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers._notices import announce, first_time, logger
from keras_towers.errors import TowerError
from keras_towers.fit.components import TowerConfig
from keras_towers.fit.update.sharding_policy import ShardedOverTowers
from keras_towers.fit.weights.model_state import output_paths
from keras_towers.partition.layouts import REPLICATED, InShards, MeshLayout
from keras_towers.rendezvous.tf_config import Cluster
from keras_towers.transport import Transport


@dataclasses.dataclass(frozen=True, eq=False)
class Mesh:
    """The devices of a process, and how a layout map divides weights over them.

    Attributes:
        layout_map: the layout map.
        axes: the names of the axes of towers and of columns.
        rows: for each tower, the devices of its columns.
    """

    layout_map: keras.distribution.LayoutMap
    axes: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(
        cls,
        layout_map: keras.distribution.LayoutMap,
        batch_dim_name: str | None = None,
        devices_of: Callable[[list[str]], Sequence[str]] = (
            devices_lib.devices_of
        ),
    ) -> Mesh:
        """Return the mesh of a layout map.

        Args:
            layout_map: how weights are divided.
            batch_dim_name: the axis of the batch; None: the first.
            devices_of: returns the devices of names; for a plan they need not
                exist.
        """
        for key in layout_map:
            try:
                re.compile(key)
            except re.error as error:
                raise TowerError(
                    f"the key {key!r} of the layout map is not a "
                    f"regular expression ({error}): write .* for any text."
                ) from None
        rows, axes = rows_of(layout_map.device_mesh, batch_dim_name)
        devices_of([*itertools.chain(*rows)])
        return cls(layout_map, axes, [devices_of(row) for row in rows])


class ClaimedDevices:
    """This rank's share of its machine, as ``share_machine`` claims it.

    Args:
        place: the place of this process.
        towers: its devices, without layouts.
        layouts: the option of this name. As a number of towers does, a mesh of
            n GPUs takes those that the rank gets by its local rank.
    """

    def __init__(
        self,
        place: Transport | Cluster,
        towers: devices_lib.Towers,
        layouts: keras.distribution.LayoutMap | None,
    ):
        self._layouts = layouts
        if layouts is None:
            self._devices = devices_lib.share_machine(place, towers)
            return
        if towers != 1:
            raise TowerError(
                f"layouts contradict towers={towers!r}: their mesh says which "
                "devices are the towers. Leave towers out."
            )
        names = [str(name) for name in np.ravel(layouts.device_mesh.devices)]
        counts = all("gpu" in name.lower() for name in names)
        share = devices_lib.share_machine(
            place, len(names) if counts else names
        )
        own = names if isinstance(share, int) else share
        self._devices = [*own]
        self._by_name = dict(zip(names, own, strict=True))

    @property
    def first_gpu(self) -> str | None:
        """The first device, once TensorFlow has started; None: the host."""
        first, *_ = devices_lib.devices_of(self._devices)
        return None if devices_lib.all_on_host([first]) else first

    def towers(self) -> list[str] | Mesh:
        """Return the devices of towers, or the mesh whose rows they are."""
        if self._layouts is None:
            return devices_lib.devices_of(self._devices)
        return Mesh.of(
            self._layouts,
            devices_of=lambda names: devices_lib.devices_of(
                [self._by_name[name] for name in names]
            ),
        )


def rows_of(
    mesh: keras.distribution.DeviceMesh, batch_dim_name: str | None
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
            "two axes, one of which is the batch axis."
        )
    devices = np.asarray(mesh.devices)
    if len(names) == 1:
        return [[str(name)] for name in devices], names
    if names[1] == batch:
        devices, names = devices.T, names[::-1]
    return [[str(name) for name in row] for row in devices], names


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
