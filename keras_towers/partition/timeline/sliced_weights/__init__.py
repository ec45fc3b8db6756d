"""Large weights in shards, gathered, used, exchanged and updated in slices.

Each module imports only those before it.

``axis_slices``
  Slices of an axis that towers divide: cutting, and putting together.
``sliced_uses``
  What of a step runs on slices of a large weight, or of its gradient.
``slice_writer``
  Operations on slices of a large weight, as a program gets them.
``weight_slices``
  Large weights in shards, gathered, used, exchanged and updated in slices.
"""
