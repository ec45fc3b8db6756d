"""One global batch on all towers, and its logs.

A step from top to bottom, as ``GlobalStep`` in ``global_step.py`` has it:

1. ``adaptive_function.py``: Keras's loop calls a train, test or predict
   function; while TensorFlow traces it, a step is added to its graph.
2. ``divided_batch.py``: the batch is divided over towers.
3. ``trace.py``: the step is traced as one device runs it, with the updates of
   its optimizers (``fit/update``).
4. ``step_layout.py``: ``partition`` makes a program of the trace.
5. ``fit/step_agreement.py``: the ranks compare their steps.
6. ``tower_program.py``: level by level, towers call functions
   (``tower_functions.py``) and exchange what these return, gradients too
   (``exchange_kinds.py``).

``adaptive_function``
  Keras's step functions: which inputs have rows, how many parts fit.
``code_lines``
  Which line of the user's code has added an operation of a trace.
``device_memory``
  Whether a model fits into the memory of its devices, before its first step.
``divided_batch``
  A batch as the towers of a program get it, and what else its inputs get.
``exchange_kinds``
  Exchanges among the towers of a process, and then among processes.
``global_step``
  The order of a step on all towers, from a batch to new weights.
``graph_function``
  A traced function, called as one operation or inlined into its caller.
``placed_tensors``
  The tensors of a step, each with a value at every place where it differs.
``planned_step``
  The needs of a step on each device; steps that are planned, and never run.
``stacked_lists``
  Lists of tensors that functions take or return which XLA compiles.
``step_costs``
  The costs of a step on towers: exchanges, and undivided computations.
``step_layout``
  The settings that a step is traced for, and its layout over towers.
``step_reports``
  Reports on steps, for users: their costs, and what XLA leaves out.
``tower_functions``
  The functions that towers call, and what XLA compiles with them.
``tower_program``
  A program as the towers run it: a function per level, and exchanges.
``tower_statistics``
  BatchNormalization with the statistics of each tower's rows.
``trace``
  The trace of a step on one device, which is then divided over towers.
``traced_constants``
  The constants of a traced step, which ranks with equal batches share.
``traced_operations``
  The operations of a traced step, by which ranks tell whether it is the same.
``fixed_tables``
  Tables that never change once they are made, such as those of words.
"""
