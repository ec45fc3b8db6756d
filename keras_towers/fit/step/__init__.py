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

``global_step``
  A step on all towers, stage by stage, from a batch to new weights.
``eager_step``
  Steps that run eagerly: as on one device, with a warning.
``own_batch_step``
  The step of a tower that has a batch of its own, which XLA compiles.
``graph``
  Adds a step to a TensorFlow graph: traced, laid out, divided over towers.
``plan``
  Finds a plan of a step that fits into the memory of its devices.
``reports``
  What a step costs, for users.
``running``
  What runs in Python before, between and after the steps of a call.
"""
