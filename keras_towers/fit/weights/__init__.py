"""Models placed on towers, and where their variables live.

``adoption``
  Placing models on towers and releasing them again.
``agreement``
  Agreement of ranks on variables, and one rank's values for all.
``copies``
  The copies and parts of variables, for whoever reads and writes them.
``least_loaded``
  The choice of a variable's device: the one with the fewest bytes.
``mirrored_variable``
  A variable with a copy on each tower, which is one variable to its users.
``model_binding``
  The binding of a model to a strategy: its stages, and its default strategy.
``model_state``
  Finding all variables of a compiled model, and of its optimizers.
``shards``
  Variables in shards: every tower has its own rows of one axis.
``tower_variables``
  Where each variable is: once, mirrored, in shards or moved; and put back.
``without_memory``
  Variables without memory: until it is needed, or where no step ever runs.
``checkpoint``
  Variables in a checkpoint of TensorFlow, of which each rank writes its parts.
``joint_access``
  Reads and writes of variables of which each rank has rows, between steps.
"""
