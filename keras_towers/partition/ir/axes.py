"""Axes of variation: ranks, towers, columns and micro-batches of a value.

A step runs on ranks. Each rank has towers, each tower has columns, and each
column computes its micro-batches one after another. The axes of a tensor say
where its values differ: at two places that differ along one of them
it has two values; places that differ along other axes only share one value.
These sets occur, each with or without columns:

* none: computed once, by all ranks alike; or ``ranks``: by the first rank;
* towers: copies of a variable, or shards that ranks share;
* towers and ranks: shards, and values computed from them;
* micro-batches, towers and ranks: rows of the batch, and values computed from
  them.

An operation's results vary along the axes of all its inputs. An exchange
crosses the axes of its input: its result no longer varies along them, unless
each participant gets a result of its own. The columns of a tower exchange by
themselves. JAX's ``shard_map`` types values in the same way.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Axis: TypeAlias = Literal["micro_batches", "columns", "towers", "ranks"]
Axes: TypeAlias = frozenset[Axis]

ONCE: Axes = frozenset()
AT_ROOT: Axes = frozenset({"ranks"})
MICRO_BATCHES: Axes = frozenset({"micro_batches"})
TOWERS: Axes = frozenset({"towers"})
COLUMNS: Axes = frozenset({"columns"})
SHARDS: Axes = frozenset({"towers", "ranks"})
BATCH: Axes = frozenset({"micro_batches", "towers", "ranks"})
# The axes along which messages are sent, the inner one first.
OF_MESSAGES: tuple[Axis, ...] = "columns", "towers", "ranks"
