"""What ``compile`` does with a model whose optimizer is distributed.

An optimizer is not told which model it is given to, and Keras decides two
things in ``compile`` that cannot be undone in a step: on a machine with GPUs a
step is compiled by XLA, which does not know Horovod's operations; and under
the policy mixed_float16 the optimizer is put into one that scales the loss. An
argument that ``compile`` does not know never gets as far as the optimizer.
From ``hvd.init()`` to ``hvd.shutdown()`` ``compile`` is therefore replaced by
one that does the same, and attends to these for models with a distributed
optimizer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from keras_towers import compat
from keras_towers.horovod import wrapping

# Keras 2 took this, and Horovod's examples give it. It chose how a step is
# run, between ways that Keras 3 does not have.
_FORGOTTEN = "experimental_run_tf_function"
_undo: list[Callable[[], None]] = []


@functools.wraps(hvd.init)
def init(*args: Any, **kwargs: Any) -> None:
    """Horovod's ``init``."""
    hvd.init(*args, **kwargs)
    replace()


@functools.wraps(hvd.shutdown)
def shutdown() -> None:
    """Horovod's ``shutdown``; Keras is as it was before ``init``."""
    restore()
    hvd.shutdown()


def replace() -> None:
    """Replace ``compile`` of all models, if that is not done yet."""
    if _undo:
        return
    # Where it is defined: Keras takes any other one for a model's own, and does
    # not call that when it loads a model.
    trainer = next(
        cls
        for cls in compat.TensorFlowTrainer.__mro__
        if "compile" in vars(cls)
    )
    original = trainer.compile

    @functools.wraps(original)
    def compile(model: Any, *args: Any, **kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("optimizer")
        if not hvd.is_initialized():
            restore()  # Horovod's own shutdown was called, past this one.
        elif is_distributed(given):
            kwargs.pop(_FORGOTTEN, None)
            original(model, *args, **kwargs)
            bound = inspect.signature(original).bind(model, *args, **kwargs)
            prepare(model, bound.arguments.get("jit_compile", "auto"))
            return
        original(model, *args, **kwargs)

    def undo() -> None:
        # Somebody else's may lie over it: then it stays, and does nothing.
        if trainer.compile is compile:
            trainer.compile = original

    trainer.compile = compile
    _undo.append(undo)


def restore() -> None:
    """Give Keras its own ``compile`` back."""
    while _undo:
        _undo.pop()()


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer, or one inside it, reduces over ranks."""
    while optimizer is not None:
        if wrapping.distribution_of(optimizer) is not None:
            return True
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return False


def prepare(model: keras.Model, jit_compile: Any = "auto") -> None:
    """Make a compiled model fit its distributed optimizer.

    Args:
        model: the model.
        jit_compile: what ``compile`` was given.
    """
    if jit_compile == "auto":
        model.jit_compile = False
    outer = model.optimizer
    inner = getattr(outer, "inner_optimizer", None)
    if inner is not None and wrapping.distribution_of(inner) is not None:
        wrapping.move_outward(inner, outer)
