"""What XLA compiles of a step, and what it cannot compile.

``kernels``
  The operations that XLA compiles, by the kernels registered in TensorFlow.
``compiled_draws``
  Random draws that XLA compiles, in functions that it does not.
``stackable``
  Lists of tensors that pass between functions as a stack.
``xla_pieces``
  Divides a level into functions that XLA compiles, and single operations.
"""
