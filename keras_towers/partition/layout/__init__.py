"""The layout of a step: which tower computes which part of each value.

One pass over the traced graph. From ``units`` to ``nodes`` are the objects that
it takes along; the folder ``rules`` has a rule for each operation. Each module
imports only those before it, and ``rules`` come before ``traced_graph``.

``units``
  Units: what rows are counted in, and the sizes that follow from them.
``conversions``
  Converts values to the layouts that operations need.
``list_conversions``
  Converts lists of tensors to the layouts that operations need.
``resources``
  The order of reads and writes of resources, and the values of variables.
``nodes``
  Nodes: the traced operations as rules see them, and their scope.
``spans``
  The ranges of axes that slices and splits select, as far as known.
``folding``
  Constant folding, of numbers, sizes and axes that are known before a step.
``division``
  Divides an operation along an axis, or applies it to partial sums.
``undivided``
  Computes an operation once, as one device does, and shares the result.
``column_exchanges``
  Exchanges between columns of a mesh, as operations in a column's graph.
``layout_pass``
  Lays out the trace of the one-device step over towers, in one pass.
``traced_graph``
  Reads a traced graph, with the layouts of its inputs, into a program.
"""
