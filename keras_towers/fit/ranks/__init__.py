"""Agreement of ranks on calls, steps and their order.

``call_agreement``
  Agreement of ranks on the arguments of a method that all of them call.
``compared_step``
  What ranks compare of a step, in a form that outlives its graph.
``plain_settings``
  The settings of a model's layers and optimizers, as plain data.
``step_agreement``
  Agreement of ranks on the step that they take, and on its data.
``step_order``
  The order of steps, and of their exchanges, on all ranks.
"""
