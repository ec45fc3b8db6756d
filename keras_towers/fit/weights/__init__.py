"""Models placed on towers, and where their variables live.

``adoption``
  Adoption: places models on towers, and releases them again.
``agreement``
  Agreement of ranks on variables, and one rank's values for all.
``copies``
  The copies and parts of variables, for whoever reads and writes them.
``least_loaded``
  Chooses the device of a variable: the one with the fewest bytes.
``mirrored_variable``
  A variable with a copy on each tower; its users see one variable.
``model_binding``
  The binding of a model to a strategy: its stages, and its default strategy.
``moved_variable``
  Variables whose value another one has for now, and functions that use them.
``model_state``
  Finds all variables of a compiled model, and of its optimizers.
``shards``
  Variables in shards: every tower has its own rows of one axis.
``tower_variables``
  Where each variable is: its home (once, mirrored, in shards, moved).
``without_memory``
  Variables without memory: until their first use, or in dry runs.
``checkpoint``
  Variables in a TensorFlow checkpoint: each rank writes its own parts.
``joint_access``
  Reads and writes of variables in shards over ranks, between steps.
``writes``
  Which variables code of the user has written.
"""
