"""What a trainer was before it was adopted, and what it has traced."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import keras

logger = logging.getLogger("keras_towers")

_xla_logged: set[str] = set()


@dataclasses.dataclass
class Before:
    """What a trainer was before it was adopted."""

    trainer: keras.Model
    jit_compile: Any
    compiled_as: Any

    def restore(self) -> None:
        """Give back what was asked for, unless it was compiled anew since."""
        if self.trainer._compile_config is self.compiled_as:
            self.trainer._jit_compile = self.jit_compile


def drop_functions(trainer: keras.Model) -> None:
    """Forget what was traced."""
    trainer.train_function = None
    trainer.test_function = None
    trainer.predict_function = None


def renew_functions(trainer: keras.Model) -> None:
    """Forget what was traced; a running ``fit`` goes on with the new ones."""
    for kind in ("train", "test", "predict"):
        if getattr(trainer, f"{kind}_function") is not None:
            getattr(trainer, f"make_{kind}_function")(force=True)


def log_xla_once(trainer: keras.Model) -> None:
    """Say once for each name that a model runs without XLA."""
    if trainer.name not in _xla_logged:
        _xla_logged.add(trainer.name)
        logger.info(
            "jit_compile is off for %s on towers: XLA cannot compile a step "
            "that spans devices",
            trainer.name,
        )
