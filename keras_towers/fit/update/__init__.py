"""Where weights and slots live, and who updates them.

``in_shards``
  Weights, or only their slots, in shards: every tower has its rows of them.
``local_sgd``
  Local SGD: ranks update their own weights and average them every k updates.
``optimizers``
  Optimizers on towers.
``weight_update``
  Where weights live, and how optimizers update them.
"""
