"""Towers of several devices, which divide each layer: tensor parallelism."""

from __future__ import annotations

from typing import Unpack

import keras

from keras_towers.fit.options import MeshKeywords, options_of
from keras_towers.foundation.errors import TowerError
from keras_towers.strategies.base import BaseStrategy
from keras_towers.strategies.device_mesh import Mesh


class ModelParallelStrategy(BaseStrategy):
    """Trains a model on a mesh of devices that divides batches and weights.

    One axis of the mesh counts towers, which share the examples of each batch.
    The other counts the devices of a tower. These share the weights that a
    ``keras.distribution.LayoutMap`` divides, and the optimizer's state for
    them. They also share the computation, for example of a transformer's pair
    of dense layers or attention heads, without gathering a kernel. Results
    equal those of one device.

    ``keras.distribution.set_distribution(keras.distribution.ModelParallel(...))``
    trains on the same strategy, so scripts for other Keras backends run
    unmodified.

    Ports the tensor parallelism of Megatron-LM (Shoeybi et al., arXiv
    1909.08053), for layouts that you choose, as in GSPMD (arXiv 2105.04663).

    Args:
        layout_map: how to divide weights over its mesh, which has one or two
            axes. An axis of a weight may name either axis of the mesh. The
            batch's axis divides the weight over towers, as
            ``weights="sharded"`` does.
        batch_dim_name: the axis of the mesh that divides batches; None: the
            first.
        mode: how the devices of the mesh exchange tensors, as for
            ``TowerStrategy``.
        gather_bytes: for weights that towers divide: how many bytes of gathered
            weights a device holds at a time.
        packer: packs tensors for an exchange, as for ``TowerStrategy``.
        **options: as for ``TowerStrategy``.

    Raises:
        TowerError: the mesh has more than two axes, a device is unknown, or a
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
        super().__init__(Mesh.of(layout_map, batch_dim_name), checked)
        self._compose()
