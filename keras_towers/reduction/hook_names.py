"""The names of hooks: the values of ``compression=``, and their effects."""

from __future__ import annotations

import tensorflow as tf

from keras_towers.foundation.object_types import (
    CompressionName as CompressionName,
)
from keras_towers.reduction.compression_hooks import (
    CommunicationHook,
    all_reduce,
    bf16_shards,
    fp16,
    fp16_shards,
)
from keras_towers.reduction.stateful_hooks import (
    ErrorFeedback,
    PowerSGD,
    StatefulHook,
)

_FEEDBACK = "; a rank's rounding error is added to its next gradient"
_NAMED: dict[str, tuple[CommunicationHook | StatefulHook, str]] = {
    "none": (all_reduce, ""),
    "fp16": (fp16, "sent in float16, and summed in float16 by NCCL and BytePS"),
    "fp16-shards": (fp16_shards, "sent in float16"),
    "bf16": (bf16_shards, "sent in bfloat16"),
    "fp16-feedback": (
        ErrorFeedback(fp16_shards, tf.float16),
        f"sent in float16{_FEEDBACK}",
    ),
    "bf16-feedback": (
        ErrorFeedback(bf16_shards, tf.bfloat16),
        f"sent in bfloat16{_FEEDBACK}",
    ),
    "power-sgd": (
        PowerSGD(),
        "sent as two low-rank factors if they are matrices; a rank's error is "
        "added to its next gradient",
    ),
}


def hook_for(
    compression: CompressionName | CommunicationHook | StatefulHook | None,
) -> CommunicationHook | StatefulHook:
    """Return the hook for a user's choice; None: ``all_reduce``."""
    if compression is None or isinstance(compression, str):
        hook, _ = _NAMED[compression or "none"]
        return hook
    return compression


def describe_effect(
    compression: CompressionName | CommunicationHook | StatefulHook | None,
) -> str:
    """Describe how gradients are exchanged, if that may change results."""
    if compression is None or isinstance(compression, str):
        _, how = _NAMED[compression or "none"]
        if not how:
            return ""
        return (
            f'compression "{compression}" changes results: gradients are {how}'
        )
    kind = type(compression).__qualname__
    name = getattr(compression, "__qualname__", kind).split(".<locals>")[0]
    return f"gradients are exchanged by {name}, which may change results"
