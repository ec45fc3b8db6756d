"""What to do about each kind of finding."""

from __future__ import annotations

from keras_towers.verification.report import Kind

_WRITTEN = (
    "write what all towers have in common: keras_towers.gather(x) for the rows "
    "of the whole batch (a queue), keras_towers.mean(values) for a mean"
)

MATCHED_DRAWS = (
    "draw with keras.random, Keras's layers or tf.random.stateless_*, for each "
    "example of the batch or in a fixed shape, and neither in a loop nor in a "
    "tf.function that the step calls: other draws cannot be those of one device"
)
"""What to do about random draws where ``random="global"`` is given."""

EAGER_DRAWS = "compile the model without run_eagerly"
"""What to do where draws are only taken for those of the examples."""

IN_A_GRAPH = (
    "make the step one that a tf.function can trace, for batches of every "
    "size, and call optimizers at its top level"
)
"""What to do about a step that runs eagerly only."""

REMEDIES = {
    Kind.COUPLES: (
        "in the loss, use keras_towers.gather(x), which gives the rows of the "
        "whole batch, or for a mean over a mask or over weights "
        "keras_towers.mean(values, mask)"
    ),
    Kind.CHANGED_BY_HAND: (
        "use clipnorm, global_clipnorm or clipvalue of the optimizer; or "
        "keras_towers.clip_by_global_norm(gradients, norm); or change what "
        "keras_towers.reduce_gradients(gradients) returns"
    ),
    Kind.SUM: (
        "TowerStrategy(average=False), if the whole loss is a sum; otherwise "
        "divide the sum by the number of examples"
    ),
    Kind.MEAN: "TowerStrategy(average=True), or a loss that is a sum",
    Kind.BATCH_NORM: (
        'TowerStrategy(batch_norm="global"), or exact=True for random layers '
        "as well; or BatchNormalization(synchronized=True)"
    ),
    Kind.RANDOM: (
        'TowerStrategy(random="global"), or exact=True for BatchNormalization '
        "as well, and draw with keras.random or Keras's layers; or accept "
        "other draws, which are as random"
    ),
    Kind.STATE: _WRITTEN,
    Kind.PLAIN_VARIABLE: f"make it a keras.Variable (add_weight); {_WRITTEN}",
    Kind.LOG: (
        "return the result of a keras.metrics metric, or a mean over the "
        "examples of the batch: keras_towers.mean(values)"
    ),
    Kind.ROWS: (
        "give all parts of a batch the same number of rows, or hold what is "
        "not one row for each example in the model"
    ),
    Kind.STATEFUL: "use stateful=False, or train this model on one device",
    Kind.FIXED_BATCH: (
        "leave the batch size open: keras.Input(shape), without batch_size or "
        "batch_shape"
    ),
    Kind.UPDATES: (
        "decide on updates with what all towers have in common, such as "
        "optimizer.iterations or keras_towers.mean(values)"
    ),
    Kind.FAILS: "make the step work for batches of every size",
}
