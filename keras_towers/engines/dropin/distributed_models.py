"""Models whose optimizer is distributed: compiled, and loaded from files.

Keras's ``compile`` chooses XLA, which does not support the engines, and wraps
optimizers to scale losses: both are seen to while an engine runs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import h5py
import keras
import numpy as np

from keras_towers import compat
from keras_towers.engines.dropin import common_callbacks
from keras_towers.engines.dropin.distributed_optimizer import (
    is_distributed,
    move_outward,
    reducer_of,
)
from keras_towers.fit.context import patches
from keras_towers.fit.weights.model_state import optimizers_in

# Keras 2 accepted this argument, and Horovod's examples pass it. It selected
# between execution modes that Keras 3 does not have.
_FORGOTTEN = "experimental_run_tf_function"
_patched: contextlib.ExitStack | None = None


def patch_keras(is_initialized: Callable[[], bool]) -> None:
    """Patch ``compile`` and ``fit`` of models until the engine shuts down.

    A ``LossScaleOptimizer`` is patched as well: it has to reduce gradients in
    place of the optimizer that it wraps.
    """
    global _patched
    if _patched is not None:
        return
    # In the class that defines it: Keras regards any other ``compile`` as a
    # custom one, which it does not call when it loads a model.
    trainer = next(
        cls
        for cls in compat.TensorFlowTrainer.__mro__
        if "compile" in vars(cls)
    )
    signature = inspect.signature(trainer.compile)
    fit_signature = inspect.signature(compat.TensorFlowTrainer.fit)

    def compile(
        original: Callable[..., None], model: Any, *args: Any, **kwargs: Any
    ) -> None:
        optimizer = args[0] if args else kwargs.get("optimizer")
        distributed = is_initialized() and is_distributed(optimizer)
        if not is_initialized():
            unpatch_keras()  # By its own shutdown, not by the drop-in's.
        if distributed:
            kwargs.pop(_FORGOTTEN, None)
        original(model, *args, **kwargs)
        if distributed:
            bound = signature.bind(model, *args, **kwargs)
            if bound.arguments.get("jit_compile", "auto") == "auto":
                model.jit_compile = False

    def fit(
        original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        optimizers = optimizers_in(model.optimizer)
        reducers = filter(None, map(reducer_of, optimizers))
        if not is_initialized() or not any(r.of_all for r in reducers):
            return original(model, *args, **kwargs)
        arguments = fit_signature.bind(model, *args, **kwargs).arguments
        with common_callbacks.with_synced_callbacks(arguments):
            return original(arguments.pop("self"), **arguments)

    def scale(
        original: Callable[..., None], outer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(outer, *args, **kwargs)
        move_outward(outer)

    scaling = keras.optimizers.LossScaleOptimizer
    with contextlib.ExitStack() as stack:
        replaced = patches.replaced(
            (trainer, "compile", compile),
            (compat.TensorFlowTrainer, "fit", fit),
            (scaling, "__init__", scale),
        )
        stack.enter_context(replaced)
        _patched = stack.pop_all()


def unpatch_keras() -> None:
    """Undo ``patch_keras``."""
    global _patched
    if _patched is not None:
        _patched.close()
    _patched = None


def load_model(
    distributed: Callable[..., Any],
    filepath: Any,
    custom_optimizers: Iterable[type] | None,
    custom_objects: dict[str, Any] | None,
    **kwargs: Any,
) -> keras.Model:
    """Load a model and give its optimizer to ``distributed``."""
    names = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath, custom_objects={**names, **(custom_objects or {})}, **kwargs
    )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if h5py.is_hdf5(filepath) and model.trainable_variables:
        optimizer = model.optimizer = _with_state_of_h5(model, filepath)
    distributed(optimizer)
    model.jit_compile = False
    return model


def _with_state_of_h5(model: keras.Model, path: Any) -> Any:
    """Make the optimizer of an ``.h5`` file; Keras does not read its state."""
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    with h5py.File(path) as file:
        if "optimizer_weights" not in file:
            return optimizer
        values = list(compat.load_h5_optimizer_weights(file))
        # Those of a file of Keras 2 are others.
        if len(values) == len(optimizer.variables):
            for variable, value in zip(
                optimizer.variables, values, strict=True
            ):
                variable.assign(np.asarray(value))
    return optimizer
