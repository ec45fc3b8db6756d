"""Meshes of logical devices, which divide the weights of any model."""

import keras

import keras_towers as kt


def on_a_mesh(weights, towers):
    """Towers of two devices, which divide all weights that they can."""
    devices = [f"cpu:{k}" for k in range(2 * towers)]
    mesh = keras.distribution.DeviceMesh((towers, 2), ("a", "b"), devices)
    layouts = keras.distribution.LayoutMap(mesh)
    for weight in weights:
        # The first axis that two can share, and the next for towers.
        axes = [None] * len(weight.shape)
        for axis, number in (("b", 2), ("a", towers)):
            even = [
                k
                for k, size in enumerate(weight.shape)
                if size and not size % number and axes[k] is None
            ]
            if even and number > 1:
                axes[even[0]] = axis
        if any(axes):
            layouts[weight.path] = tuple(axes)
    return kt.ModelParallelStrategy(layouts)
