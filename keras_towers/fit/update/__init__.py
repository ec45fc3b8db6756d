"""Where weights and slots live, and who updates them.

``local_sgd``
  Local SGD: ranks update their own weights and average them every k updates.
``optimizers``
  Optimizers on towers.
``variable_layouts``
  Where towers have weights and slots, and how they divide them.
``weight_update``
  Where weights and slots live, and how optimizers update them.
"""
