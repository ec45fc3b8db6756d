"""The names of compressions, which TensorFlow is not needed to check."""

from typing import Literal, TypeAlias

CompressionName: TypeAlias = Literal[
    "none",
    "fp16",
    "fp16-shards",
    "bf16",
    "fp16-feedback",
    "bf16-feedback",
    "power-sgd",
]
"""How gradients are exchanged between processes."""
