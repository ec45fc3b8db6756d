"""One global batch on all towers, and its logs.

A step from top to bottom, as ``GlobalStep`` in ``global_step.py`` has it:

1. ``adaptive_function.py``: Keras's loop calls a train, test or predict
   function; while TensorFlow traces it, a step is added to its graph.
2. ``divided_batch.py``: the batch is divided over towers.
3. ``trace.py``: the step is traced as one device runs it.
4. ``step_layout.py``: ``partition`` makes a program of the trace.
5. ``fit/step_order.py``: the ranks compare their programs.
6. ``tower_program.py``: level by level, towers call functions
   (``tower_functions.py``) and exchange what these return
   (``tower_exchanges.py``, ``exchanges.py``).
7. ``fit/update``: gradients are summed, and optimizers applied.
"""
