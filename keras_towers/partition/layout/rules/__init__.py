"""The rules of operations, by families.

At the end of the file of its family, each operation has one row with all that
is known of it, such as ``operation("MatMul", ...)``. ``OperationFacts`` in
``registry.py`` says what that may be. To add an operation, add a row, and a
case to ``tests/partition/layout/rules/cases``. An operation without a row is
computed once, as on one device.

``batched``
  Operations on each item of a batch: images, matrices, distributions.
``control_flow``
  Branches and calls of functions, and code that all loops share.
``random_ops``
  Random numbers from a seed, such as dropout: a tower draws those of its rows.
``elementwise``
  Elementwise operations: arithmetic, choices and functions.
``indexing``
  Gathers, scatters, segments and sparse matrices.
``lists``
  Lists of tensors in loops, and optional values in branches.
``loops``
  Loops: a tower runs all rounds, or the rounds of its rows.
``ragged``
  Ragged tensors: each row is the entries between two row splits.
``reductions``
  Sums, means and extremes along axes, and cumulative operations.
``row_loops``
  Loops with a round for each row: a tower runs the rounds of its own rows.
``row_numbers``
  Row numbers: integers that refer to rows.
``row_splits``
  Row splits: where the rows of a ragged tensor begin and end.
``shapes``
  Shapes, and operations that create, move, join or split axes.
``slices``
  Slices, splits and padding.
``variables``
  Reads, writes and lookups of variables, such as embedding tables.
"""

import importlib
import pkgutil

# Each module adds its rows.
for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
