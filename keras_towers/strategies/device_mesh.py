"""A mesh of devices in each process, whose rows are towers."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

import keras
import numpy as np

from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous.tf_config import Cluster
from keras_towers.transport import Transport, devices as devices_lib


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
