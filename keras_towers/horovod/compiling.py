"""What ``compile`` does with a model whose optimizer is distributed.

An optimizer is not told which model it is given to, and Keras decides two
things in ``compile`` that cannot be undone in a step: on a machine with GPUs a
step is compiled by XLA, which does not know Horovod's operations; and under
the policy mixed_float16 the optimizer is put into one that scales the loss.
``compile`` is therefore replaced, once and for good, by one that does what it
did before, and attends to these for models with a distributed optimizer.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from keras_towers import compat
from keras_towers.horovod import wrapping

# Keras 2 took this, and Horovod's examples give it. It chose how a step is
# run, between ways that Keras 3 does not have.
_FORGOTTEN = "experimental_run_tf_function"


def install() -> None:
    """Replace ``compile`` of all models, if that is not done yet."""
    # Where it is defined: Keras takes any other one for a model's own, and does
    # not call that when it loads a model.
    trainer = next(
        cls
        for cls in compat.TensorFlowTrainer.__mro__
        if "compile" in vars(cls)
    )
    original = trainer.compile
    if hasattr(original, "__keras_towers_horovod__"):
        return

    @functools.wraps(original)
    def compile(model: Any, *args: Any, **kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("optimizer")
        if is_distributed(given):
            kwargs.pop(_FORGOTTEN, None)
        original(model, *args, **kwargs)
        if not is_distributed(given):
            return
        arguments = inspect.signature(original).bind(model, *args, **kwargs)
        arguments.apply_defaults()
        prepare(model, arguments.arguments["jit_compile"])

    compile.__keras_towers_horovod__ = True
    trainer.compile = compile


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer, or one inside it, reduces over ranks."""
    while optimizer is not None:
        if wrapping.state_of(optimizer) is not None:
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
    if inner is not None and wrapping.state_of(inner) is not None:
        wrapping.hand_out(inner, outer)
