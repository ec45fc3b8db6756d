"""Models with a distributed optimizer: how they are compiled and loaded.

Keras's ``compile`` chooses XLA, which does not support the engines, and may
wrap the optimizer to scale losses. Patches handle both while an engine runs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable

import h5py
import keras
import numpy as np

from keras_towers.engines.dropin import horovod_callbacks
from keras_towers.engines.dropin.gradient_reducer import (
    is_distributed,
    move_reducer_outward,
    reducer_of,
)
from keras_towers.fit.components import KerasCall
from keras_towers.fit.context import patches
from keras_towers.fit.weights.model_state import optimizers_in
from keras_towers.foundation import compat

# Horovod's examples pass this argument. In Keras 2 it selected between modes of
# execution that Keras 3 does not have.
_OBSOLETE = "experimental_run_tf_function"
_patched: contextlib.ExitStack | None = None


def patch_keras(is_initialized: Callable[[], bool]) -> None:
    """Patch ``compile`` and ``fit`` of models until the engine shuts down.

    A ``LossScaleOptimizer`` is patched as well: it has to reduce gradients in
    place of the optimizer that it wraps.
    """
    global _patched
    if _patched is not None:
        return
    # The class that defines it: Keras would regard a ``compile`` of any other
    # class as custom, and not call it when it loads a model.
    trainer = next(
        cls
        for cls in compat.TensorFlowTrainer.__mro__
        if "compile" in vars(cls)
    )
    signature = inspect.signature(trainer.compile)

    def compile_without_xla(
        original: Callable[..., None],
        model: keras.Model,
        *args: object,
        **kwargs: object,
    ) -> None:
        optimizer = args[0] if args else kwargs.get("optimizer")
        distributed = is_initialized() and is_distributed(optimizer)
        if not is_initialized():
            # The engine was shut down by its own function, not the drop-in's.
            unpatch_keras()
        if distributed:
            kwargs.pop(_OBSOLETE, None)
        original(model, *args, **kwargs)
        if distributed:
            bound = signature.bind(model, *args, **kwargs)
            if bound.arguments.get("jit_compile", "auto") == "auto":
                model.jit_compile = False

    def fit_with_synced_callbacks(
        original: Callable[..., keras.callbacks.History],
        model: keras.Model,
        *args: object,
        **kwargs: object,
    ) -> keras.callbacks.History:
        optimizers = optimizers_in(model.optimizer)
        reducers = filter(None, map(reducer_of, optimizers))
        if not is_initialized() or not any(r.all_ranks for r in reducers):
            return original(model, *args, **kwargs)
        call = KerasCall.of("fit", original, model, args, kwargs)
        with horovod_callbacks.sync_callbacks(call.arguments):
            return call.call_keras()

    def scale_losses(
        original: Callable[..., None],
        outer: keras.optimizers.LossScaleOptimizer,
        *args: object,
        **kwargs: object,
    ) -> None:
        original(outer, *args, **kwargs)
        move_reducer_outward(outer)

    undo = contextlib.ExitStack()
    undo.enter_context(
        patches.replaced(
            (trainer, "compile", compile_without_xla),
            (compat.TensorFlowTrainer, "fit", fit_with_synced_callbacks),
            (keras.optimizers.LossScaleOptimizer, "__init__", scale_losses),
        )
    )
    _patched = undo


def unpatch_keras() -> None:
    """Undo ``patch_keras``."""
    global _patched
    if _patched is not None:
        _patched.close()
    _patched = None


def load_model(
    distribute: Callable[..., object],
    filepath: object,
    custom_optimizers: Iterable[type] | None,
    custom_objects: dict[str, object] | None,
    **kwargs: object,
) -> keras.Model:
    """Load a model and call ``distribute`` on its optimizer."""
    names = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath, custom_objects={**names, **(custom_objects or {})}, **kwargs
    )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if h5py.is_hdf5(filepath) and model.trainable_variables:
        optimizer = model.optimizer = _h5_optimizer(model, filepath)
    distribute(optimizer)
    model.jit_compile = False
    return model


def _h5_optimizer(model: keras.Model, path: object) -> keras.Optimizer:
    """Make an ``.h5`` file's optimizer, with the state that Keras ignores."""
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    with h5py.File(path) as file:
        if "optimizer_weights" not in file:
            return optimizer
        values = list(compat.load_h5_optimizer_weights(file))
        # The optimizers of Keras 2 saved different variables.
        if len(values) == len(optimizer.variables):
            for variable, value in zip(
                optimizer.variables, values, strict=True
            ):
                variable.assign(np.asarray(value))
    return optimizer
