"""Agreement of ranks on calls, steps and their order.

``call_agreement``
  Agreement of all ranks on the arguments of a method that they call.
``plain_settings``
  The plain settings of a model's layers and optimizers.
``step_agreement``
  Whether all ranks are about to take the same step, on the same data.
``step_order``
  The order of steps, and of their exchanges, on all ranks.
"""
