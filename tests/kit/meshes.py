"""Meshes of logical devices, which divide the weights of any model."""

import keras

import keras_towers as kt


def mesh_of(rows, columns, axes=("batch", "model"), devices=None):
    """A mesh; of logical CPUs, where it is told no devices."""
    devices = devices or [f"cpu:{k}" for k in range(rows * columns)]
    return keras.distribution.DeviceMesh((rows, columns), axes, devices)


def layout_map(mesh, layouts):
    """The layouts of a dict."""
    made = keras.distribution.LayoutMap(mesh)
    for key, axes in layouts.items():
        made[key] = axes
    return made


def on_a_mesh(weights, towers, **options):
    """Towers of two devices, which divide all weights that they can."""
    layouts = {}
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
    mesh = mesh_of(towers, 2, ("a", "b"))
    return kt.ModelParallelStrategy(layout_map(mesh, layouts), **options)
