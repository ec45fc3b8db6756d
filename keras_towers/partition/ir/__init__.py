"""A step as a program: operations, tensors, exchanges, and facts about both.

What is laid out, and what comes out of it: symbolic sizes, the axes along which
a tensor varies, the layout of a value, and the facts that the package knows of
an operation. Each module imports only those before it.

``sizes``
  Symbolic sizes: exact expressions in the number of examples.
``axes``
  Axes of variation: ranks, towers, columns and micro-batches of a value.
``program``
  A program: a step over towers as operations and exchanges between them.
``reasons``
  The reasons why an operation is not divided.
``builder``
  Builds a program: adds operations, exchanges and computations of sizes.
``layouts``
  Layouts: how towers hold a value of the one-device step.
``values``
  Values of the one-device step: their layouts, and what is known of them.
``registry``
  The registry of operations: one row of facts for each type.
``effects``
  The side effects of operations, such as writes, prints and draws.
``called_functions``
  The functions that operations call: a program's own, or traced ones by name.
``estimated_work``
  Estimates the work of an operation from the sizes of its tensors.
``list_memory``
  Which lists of a loop have the same tensors in memory.
``tensor_sizes``
  The sizes of a program's tensors, for an assumed batch.
"""
