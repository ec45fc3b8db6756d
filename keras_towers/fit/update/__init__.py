"""Updates of weights: where weights and slots are, and who updates them.

``local_sgd``
  Local SGD: ranks update their own weights and average them every k updates.
``optimizers``
  Optimizers on towers: an update on one tower, as on one device.
``sharding_policy``
  Which weights and slots are copied, placed or sharded (ZeRO) over towers.
``weight_update``
  Updates of weights: places weights and slots, and applies gradients.
"""
