"""Along what a value varies: the axes of the places that have their own.

A step is computed by ranks, each with towers, each with columns, which compute
their micro-batches, the parts, one after another. A tensor has a set of axes:
at two places that differ along one of them it has two values, which may be
equal; places that differ along others only share one. The sets that occur, each
with the columns of a mesh or without:

* none: computed once, by all ranks alike; and of ranks: by the first one only;
* of towers: their copies of a variable, or shards of it that ranks share;
* of towers and ranks: shards, and what follows from these;
* of parts, towers and ranks: rows of the batch, and what follows from these.

What an operation computes varies along the axes of all its inputs. An exchange
crosses those of what it is given, so that nothing varies along them any more,
unless everyone gets a result of its own. Between the columns of a tower are
exchanges of their own. JAX's ``shard_map`` types values likewise.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Axis: TypeAlias = Literal["parts", "columns", "towers", "ranks"]
Axes: TypeAlias = frozenset[Axis]

ONCE: Axes = frozenset()
AT_ROOT: Axes = frozenset({"ranks"})
PARTS: Axes = frozenset({"parts"})
TOWERS: Axes = frozenset({"towers"})
COLUMNS: Axes = frozenset({"columns"})
SHARDS: Axes = frozenset({"towers", "ranks"})
BATCH: Axes = frozenset({"parts", "towers", "ranks"})
# Those between which messages are sent, the inner one first.
OF_MESSAGES: tuple[Axis, ...] = "columns", "towers", "ranks"
