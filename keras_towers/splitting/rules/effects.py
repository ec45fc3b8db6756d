"""Random numbers, and what an operation does besides computing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from keras_towers.partition.sizes import UNKNOWN, examples_in, grows
from keras_towers.splitting.joining import nothing
from keras_towers.splitting.nodes import Node
from keras_towers.splitting.rules.common import refuse_others, rule
from keras_towers.splitting.values import (
    DoesNotSplit,
    Kind,
    Rows,
    Value,
    examples,
    same,
)

STATELESS_DRAWS = tuple(
    f"Stateless{name}{version}"
    for name in (
        *("RandomUniform", "RandomNormal", "TruncatedNormal"),
        *("RandomUniformInt", "RandomUniformFullInt"),
    )
    for version in ("", "V2")
)
STATEFUL_DRAWS = (
    *("RandomUniform", "RandomStandardNormal", "TruncatedNormal"),
    *("RandomUniformInt", "StatefulUniform", "StatefulUniformInt"),
    *("StatefulStandardNormalV2", "StatefulTruncatedNormal"),
)
_SEED = "makes a seed of what follows from the batch"


def drawn(node: Node, target: Value) -> Value:
    """Return the value of random numbers of a shape."""
    static = node.static_shape()
    shape = static if target.known is None else tuple(target.known)
    if shape is None or (target.known is None and not target.is_same):
        raise DoesNotSplit(
            "draws as many random numbers as follow from the data"
        )
    grown = [a for a, s in enumerate(shape) if grows(s) or s is UNKNOWN]
    if not grown:
        return same(shape=shape)
    if len(grown) > 1:
        raise DoesNotSplit("draws random numbers for all pairs of examples")
    count = examples_in(shape[grown[0]])
    if count is None:
        raise DoesNotSplit("draws random numbers for some of the examples")
    if count == 1:
        return examples(Rows(grown[0]), shape=shape)
    rows = Rows(grown[0], 1, count, draw=node.operation)
    return examples(rows, shape=shape)


@rule(
    *("StatelessRandomGetKeyCounter", "StatelessRandomGetAlg"),
    "StatelessRandomGetKeyCounterAlg",
)
def _key(node: Node, *seed: Value) -> Value:
    refuse_others(seed, _SEED)
    return same()


@rule("RandomShuffle", "StatelessShuffle", "RandomIndexShuffle")
def _shuffled(node: Node, value: Value, *seeds: Value) -> Value:
    if value.grows or value.kind is not Kind.SAME:
        raise DoesNotSplit("shuffles the examples of the batch")
    refuse_others(seeds, _SEED)
    if node.is_stateful:
        raise DoesNotSplit("shuffles in another order on every tower")
    return value.with_(shape=value.shape)


@rule("Assert", "NoOp")
def _nothing(node: Node, *values: Value) -> list[Value]:
    return []


@rule("OptionalFromValue", sizes=range(sys.maxsize))
def _optional(node: Node, *values: Value) -> Value:
    return Value(Kind.OPTIONAL, items=values)


@rule("OptionalGetValue")
def _held(node: Node, optional: Value) -> Value | Sequence[Value]:
    is_known = optional.kind is Kind.OPTIONAL
    return optional.items if is_known else same(None)


@rule("OptionalNone", "OptionalHasValue")
def _is_held(node: Node, *optional: Value) -> Value:
    return same() if optional else nothing()
