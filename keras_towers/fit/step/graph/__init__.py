"""Adds a step to a TensorFlow graph: traced, laid out, divided over towers.

``code_lines``
  The line of the user's code that has added an operation to a trace.
``exchange_kinds``
  Exchanges of a step: among the towers of a process, then among processes.
``fixed_tables``
  Tables that never change after they are made, such as vocabularies.
``graph_function``
  A traced function, called as one operation or inlined into its caller.
``placed_tensors``
  The tensors of a step, with one value at each place where they differ.
``program_text``
  The canonical text of a traced step, by which ranks compare it.
``stacked_lists``
  Lists of tensors as inputs and results of functions that XLA compiles.
``step_clock``
  Marks in a training step: the times at which towers reach certain points.
``step_function``
  A step of all towers as a function of its own.
``step_inputs``
  A batch divided over towers, and the other inputs of a program.
``step_layout``
  The layout of a step over towers, and the settings that it is traced for.
``tower_functions``
  The functions that towers call, and what XLA compiles with them.
``tower_program``
  Adds a program to a graph: a function per level, and exchanges.
``tower_statistics``
  BatchNormalization with the statistics of each tower's rows.
``trace``
  The trace of a step on one device, which is then divided over towers.
``pushed_gradients``
  Gradients that a step passes on, rather than update variables with them.
``step_comparison``
  What ranks compare of a step that they have traced, and share of it.
"""
