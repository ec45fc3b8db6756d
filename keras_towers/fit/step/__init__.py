"""One global batch on all towers, and its logs.

A step from top to bottom, as ``GlobalStep`` in ``global_step.py`` has it:

1. ``adaptive_function.py``: Keras's loop calls a train, test or predict
   function; while TensorFlow traces it, a step is added to its graph.
2. ``step_inputs.py``: the batch is divided over towers.
3. ``trace.py``: the step is traced as one device runs it, with the updates of
   its optimizers (``fit/update``).
4. ``step_layout.py``: ``partition`` makes a program of the trace, and a
   timeline that fits into memory (``plan_search.py``).
5. ``fit/ranks/step_agreement.py``: the ranks compare their steps.
6. ``tower_program.py``: level by level, towers call functions
   (``tower_functions.py``) and exchange what these return, gradients too
   (``exchange_kinds.py``).

``adaptive_function``
  Keras's step functions, adapted to batches and to memory.
``code_lines``
  The line of the user's code that has added an operation to a trace.
``device_memory``
  Makes models fit into the memory of their devices, or refuses them.
``dry_run``
  Dry runs: steps that are laid out, and their memory, but that never run.
``exchange_kinds``
  Exchanges of a step: among the towers of a process, then among processes.
``fixed_tables``
  Tables that never change after they are made, such as vocabularies.
``global_step``
  A step on all towers, stage by stage, from a batch to new weights.
``graph_function``
  A traced function, called as one operation or inlined into its caller.
``heap_trim``
  Gives back to the system what building a step has freed.
``memory_retries``
  Repeats steps that run out of memory, with plans that need less.
``placed_tensors``
  The tensors of a step, with one value at each place where they differ.
``plan_search``
  The search for the cheapest plan of a step that fits into memory.
``program_text``
  The canonical text of a traced step, by which ranks compare it.
``stacked_lists``
  Lists of tensors as inputs and results of functions that XLA compiles.
``step_clock``
  Marks in a training step: the times at which towers reach certain points.
``step_costs``
  The costs of a step on towers: exchanges, and undivided computations.
``step_function``
  A step of all towers as a function of its own.
``step_inputs``
  A batch divided over towers, and the other inputs of a program.
``step_layout``
  The layout of a step over towers, and the settings that it is traced for.
``step_reports``
  Reports on steps, for users: their costs, and what XLA leaves out.
``tower_functions``
  The functions that towers call, and what XLA compiles with them.
``tower_program``
  Adds a program to a graph: a function per level, and exchanges.
``tower_statistics``
  BatchNormalization with the statistics of each tower's rows.
``trace``
  The trace of a step on one device, which is then divided over towers.
"""
