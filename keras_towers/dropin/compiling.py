"""What ``compile`` does with a model whose optimizer is distributed.

An optimizer does not know its model, and Keras makes two decisions in
``compile`` that cannot be changed later: on a machine with GPUs the step is
compiled with XLA, which does not support the engines' operations; and under the
policy mixed_float16 the optimizer is wrapped in one that scales the loss. Also,
``compile`` rejects an argument that Horovod's examples pass. Therefore, while
an engine is initialized, ``compile`` is replaced by one that handles these
cases for models with a distributed optimizer, and otherwise does the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_towers import compat
from keras_towers.dropin import wrapping

# Keras 2 accepted this argument, and Horovod's examples pass it. It selected
# between execution modes that Keras 3 does not have.
_FORGOTTEN = "experimental_run_tf_function"
_undo: list[Callable[[], None]] = []


def replace(is_initialized: Callable[[], bool]) -> None:
    """Replace ``compile`` of all models, unless already done.

    Args:
        is_initialized: whether the engine still is. When it is not any more,
            what was replaced is restored.
    """
    if _undo:
        return
    # In the class that defines it: Keras regards any other ``compile`` as a
    # custom one, which it does not call when it loads a model.
    trainer = next(
        cls
        for cls in compat.TensorFlowTrainer.__mro__
        if "compile" in vars(cls)
    )
    original = trainer.compile

    @functools.wraps(original)
    def compile(model: Any, *args: Any, **kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("optimizer")
        if not is_initialized():
            restore()  # By its own shutdown, not by the drop-in's.
        elif is_distributed(given):
            kwargs.pop(_FORGOTTEN, None)
            original(model, *args, **kwargs)
            bound = inspect.signature(original).bind(model, *args, **kwargs)
            prepare(model, bound.arguments.get("jit_compile", "auto"))
            return
        original(model, *args, **kwargs)

    def undo() -> None:
        # If something else has replaced it since, leave it; it does nothing.
        if trainer.compile is compile:
            trainer.compile = original

    trainer.compile = compile
    _undo.append(undo)


def restore() -> None:
    """Restore Keras's ``compile``."""
    while _undo:
        _undo.pop()()


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer, or one that it wraps, reduces over ranks."""
    while optimizer is not None:
        if wrapping.distribution_of(optimizer) is not None:
            return True
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return False


def prepare(model: keras.Model, jit_compile: Any = "auto") -> None:
    """Adapt a compiled model to its distributed optimizer.

    Args:
        model: the model.
        jit_compile: the argument that was passed to ``compile``.
    """
    if jit_compile == "auto":
        model.jit_compile = False
    outer = model.optimizer
    inner = getattr(outer, "inner_optimizer", None)
    if inner is not None and wrapping.distribution_of(inner) is not None:
        wrapping.move_outward(inner, outer)
