"""A transformer of 35 million weights, in bfloat16, as GPUs train it.

    keras-towers bench --models benchmarks.transformer:build --batch-size 32

With one GPU, ``--memory-limit 16384 --towers 2,4`` shows what towers cost.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

_TOKENS, _WORDS, _WIDTH, _HEADS, _BLOCKS = 256, 4000, 768, 12, 4
_EXAMPLES = 64


def build() -> tuple[Any, Any, Any]:
    """Return the compiled model, its inputs and its labels."""
    options: dict[str, Any] = {"dtype": "mixed_bfloat16"}
    tokens = keras.Input((_TOKENS,), dtype="int32")
    x = layers.Embedding(_WORDS, _WIDTH, **options)(tokens)
    for _ in range(_BLOCKS):
        normed = layers.LayerNormalization(**options)(x)
        attention = layers.MultiHeadAttention(
            _HEADS, _WIDTH // _HEADS, **options
        )
        x = layers.Add(**options)([x, attention(normed, normed)])
        inner = layers.LayerNormalization(**options)(x)
        inner = layers.Dense(4 * _WIDTH, "gelu", **options)(inner)
        inner = layers.Dense(_WIDTH, **options)(inner)
        x = layers.Add(**options)([x, inner])
    model = keras.Model(tokens, layers.Dense(_WORDS)(x))
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, _WORDS, (2, _EXAMPLES, _TOKENS), dtype="int32")
    return model, x, y
