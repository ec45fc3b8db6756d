"""Names of Horovod that the drop-in does not have, and what to use instead."""

from __future__ import annotations

from typing import NoReturn

_IMPORT = "import it from horovod.tensorflow"
_TF1 = "that is of TensorFlow 1"

INSTEAD: dict[str, str] = {
    "LocalGradientAggregationHelper": (
        "give hvd.DistributedOptimizer backward_passes_per_step"
    ),
    "broadcast_object_fn": f"{_TF1}: call hvd.broadcast_object",
    "check_extension": _IMPORT,
    "check_num_rank_power_of_2": _IMPORT,
    "compression": "use hvd.Compression",
    "gpu_available": "use tf.config.list_physical_devices('GPU')",
    "gradient_aggregation": "it is internal to Horovod",
    "gradient_aggregation_eager": "it is internal to Horovod",
    "handle_average_backwards_compatibility": _IMPORT,
    "is_version_greater_equal_than": "use packaging.version",
    "keras": "this module is it; for Keras itself, import keras",
    "mpi_ops": "all operations are in this module",
    "refs_to_vars": _IMPORT,
    "split_list": _IMPORT,
    "util": _IMPORT,
    "vars_to_refs": _IMPORT,
    # Of the elastic module.
    "run_fn": "use hvd.elastic.run",
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise the error for a name that a module does not have."""
    advice = INSTEAD.get(name)
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}"
        + (f": {advice}." if advice else "")
    )
