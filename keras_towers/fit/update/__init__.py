"""Where weights and slots live, and who updates them.

``local_sgd``
  Local SGD: ranks update their own weights and average them every k updates.
``optimizers``
  Optimizers on towers.
``sharding_policy``
  Which weights and slots are copied, placed or sharded (ZeRO) over towers.
``weight_update``
  Where weights and slots live, and how optimizers update them.
"""
