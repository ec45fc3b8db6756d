"""The cases of the exactness contract: a model, its ``fit``, a tolerance."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_towers.foundation.object_types import Structure
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import TOLERANCE

BATCH = 16
_UNEVEN = 53

Fit: TypeAlias = Callable[[keras.Model], Structure]
"""Trains a model; returns its ``History``, or what several contain."""


def fit(
    x: Structure,
    y: Structure = None,
    count: int = m.EXAMPLES,
    **options: object,
) -> Fit:
    """Fit a model to the first ``count`` examples, in order, for two epochs."""
    weights = options.pop("sample_weight", None)
    x, y, weights = tf.nest.map_structure(
        lambda array: None if array is None else array[:count], (x, y, weights)
    )
    arguments = {"batch_size": BATCH, "epochs": 2, "verbose": 0, **options}

    def run(model: keras.Model) -> keras.callbacks.History:
        return model.fit(
            x, y, sample_weight=weights, shuffle=False, **arguments
        )

    return run


def one_after_another(*fits: Fit) -> Fit:
    """Several fits of one model; returns what all of them have logged."""

    def run(model: keras.Model) -> dict[str, list[float]]:
        return {
            f"{name} of fit {number}": values
            for number, fit in enumerate(fits)
            for name, values in fit(model).history.items()
        }

    return run


@dataclasses.dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        build: makes the compiled model, the same every time.
        fit: trains it.
        tolerance: the largest difference allowed in weights and ``History``.
        in_graph: whether one device logs the same in a graph only.
    """

    build: Callable[[], keras.Model]
    fit: Fit = fit(m.FEATURES, m.LABELS, _UNEVEN)
    tolerance: float = TOLERANCE
    in_graph: bool = False


def case(
    *fits: Fit,
    build: Callable[[], keras.Model] = m.mlp,
    optimizer: Callable[[], keras.optimizers.Optimizer] = m.momentum,
    tolerance: float = TOLERANCE,
    in_graph: bool = False,
    **options: Any,
) -> Case:
    """A case of one or more fits of a model; by default of uneven batches.

    Args:
        *fits: one after the other.
        build: makes the model, as for ``compiled``.
        optimizer: makes the optimizer.
        tolerance: of the case.
        in_graph: of the case.
        **options: for ``compiled``.
    """
    fits = fits or (_plain(_UNEVEN),)
    run = one_after_another(*fits) if fits[1:] else fits[0]
    make = m.compiled(build, optimizer, **options)
    return Case(make, run, tolerance, in_graph)


def _momentum(**options: object) -> Callable[[], keras.optimizers.Optimizer]:
    """A function that makes SGD with momentum."""
    return functools.partial(m.momentum, **options)


def _scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(
        m.momentum(), initial_scale=1024.0, dynamic_growth_steps=3
    )


def _subclassed(cls: type[keras.Model]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        keras.utils.set_random_seed(6)
        return cls()

    return build


def _half_precision() -> keras.Model:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(6)
    try:
        return m.mlp(layers.Dense(6, "tanh"))
    finally:
        keras.config.set_dtype_policy(before)


# Infinity among the examples of one tower only, whatever their number.
OVERFLOW: np.ndarray = m.FEATURES.copy()
OVERFLOW[BATCH + 1] = np.inf
_plain = functools.partial(fit, m.FEATURES, m.LABELS)

CASES: dict[str, Case] = {
    "uneven": case(),
    "last-batch-of-one": case(_plain(49)),
    "odd-batches": case(
        _plain(batch_size=7, epochs=1),
        _plain(50, epochs=1),
        _plain(9, batch_size=1, epochs=1),
    ),
    "sample-weight": case(
        _plain(_UNEVEN, sample_weight=m.WEIGHTS, epochs=1),
        _plain(_UNEVEN, class_weight={0: 0.2, 1: 1.0, 2: 3.0}, epochs=1),
    ),
    "validation": case(
        _plain(
            _UNEVEN,
            validation_data=(m.FEATURES[:37], m.LABELS[:37]),
            validation_batch_size=9,
        ),
        _plain(_UNEVEN, validation_split=0.3, epochs=1),
        metrics=lambda: [
            "accuracy",
            keras.metrics.SparseTopKCategoricalAccuracy(2),
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
        ],
    ),
    "accumulation": case(optimizer=_momentum(gradient_accumulation_steps=3)),
    "accumulation-clipped": case(
        _plain(),
        optimizer=_momentum(
            gradient_accumulation_steps=2, global_clipnorm=0.05
        ),
    ),
    "ema-overwrite": case(
        optimizer=_momentum(
            use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
        )
    ),
    "loss-scale-overflow": case(
        fit(OVERFLOW, m.LABELS),
        _plain(epochs=1),
        optimizer=_scaled,
        metrics=list,
    ),
    "loss-scale-of-own-step": case(
        fit(OVERFLOW, m.LABELS),
        _plain(epochs=1),
        build=_subclassed(m.ScaledStep),
        optimizer=_scaled,
        metrics=list,
    ),
    # In eager steps, Python counts each of them.
    "counting-python": case(build=_subclassed(m.Counting), in_graph=True),
    # float16 rounds each tower's part of a gradient: 11 bits, not 24.
    "mixed-float16": case(build=_half_precision, tolerance=2e-3),
    "embedding-clipped": case(
        fit(m.TOKENS, m.LABELS),
        build=m.with_embedding,
        optimizer=_momentum(global_clipnorm=0.05),
    ),
    "regularizers": case(
        build=lambda: m.mlp(
            layers.ActivityRegularization(l2=0.01),
            regularizer=keras.regularizers.L2(0.01),
        )
    ),
    "sync-batch-norm": case(
        _plain(_UNEVEN, validation_data=(m.FEATURES, m.LABELS)),
        build=lambda: m.mlp(layers.BatchNormalization(synchronized=True)),
        optimizer=lambda: keras.optimizers.Adam(0.01),
        tolerance=5e-6,
    ),
    # Seeds go on in step, also on towers without an example.
    "draws": case(
        _plain(
            49,
            validation_data=(m.FEATURES[:37], m.LABELS[:37]),
            validation_batch_size=9,
        ),
        build=lambda: m.mlp(m.Always(0.4, seed=2)),
        steps_per_execution=3,
        tolerance=4e-6,
    ),
    # One device computes it again for gradients.
    "recomputed": case(
        build=lambda: m.mlp(layers.Lambda(tf.recompute_grad(tf.nn.gelu)))
    ),
    "several-losses": case(
        fit(
            {"features": m.FEATURES, "tokens": m.TOKENS},
            {"label": m.LABELS, "target": m.TARGETS},
            _UNEVEN,
            sample_weight={"label": m.WEIGHTS, "target": m.WEIGHTS[::-1]},
        ),
        build=m.two_headed,
        loss=lambda: {
            "label": m.cross_entropy(reduction="mean_with_sample_weight"),
            "target": keras.losses.MeanSquaredError(reduction="sum"),
        },
        loss_weights={"label": 0.3, "target": 0.1},
        metrics=lambda: {"label": ["accuracy"], "target": ["mae", "mse"]},
        weighted_metrics={"label": [], "target": ["mse"]},
        # Keras logs a metric of each loss in a graph only.
        in_graph=True,
    ),
    "mask": case(
        fit(m.SENTENCES, m.SENTENCE_LABELS, _UNEVEN),
        build=m.with_mask,
        weighted_metrics=["accuracy"],
    ),
    "steps-per-execution": case(steps_per_execution=3),
    "eager": case(_plain(_UNEVEN, epochs=1), run_eagerly=True),
    "lazy": case(build=_subclassed(m.Lazy)),
    "own-train-step": case(build=_subclassed(m.OwnStep), metrics=list),
    "gan": Case(m.gan, fit(m.FEATURES, count=_UNEVEN)),
    "contrastive": Case(m.contrastive),
    # So large matrices that rows are exchanged, not their gradients.
    "wide": case(
        build=m.wide,
        optimizer=_momentum(gradient_accumulation_steps=2, global_clipnorm=0.1),
    ),
}

HARDEST: tuple[str, ...] = (
    "embedding-clipped",
    "accumulation",
    "sync-batch-norm",
    "gan",
)
"""Where reductions differ most: sparse gradients, uneven ends, state in a
condition, several reductions in a step."""
