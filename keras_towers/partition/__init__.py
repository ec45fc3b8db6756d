"""One device's step, laid out over towers.

This package takes a traced graph, and returns a program: the operations that
every tower runs, the operations that are computed once, and the exchanges
between them. It does not depend on strategies, devices or Keras.

An example: a dense layer, a softmax, the mean loss and its gradient. The rows
of ``x`` and ``labels`` are examples, which are divided over towers::

    scores = x @ w
    losses = -tf.reduce_sum(labels * tf.math.log(tf.nn.softmax(scores)), -1)
    loss = tf.reduce_mean(losses)
    gradient = tape.gradient(loss, w)
    flat = tf.reshape(scores, [-1])
    twice = tf.concat([losses, losses], 0)

=========  ======  ==========  ======  ====
value      shape   layout      blocks  rows
=========  ======  ==========  ======  ====
x          n, 4    Sharded     1       1
labels     n, 3    Sharded     1       1
w          4, 3    Replicated
scores     n, 3    Sharded     1       1
losses     n       Sharded     1       1
loss               Partial
gradient   4, 3    Partial
flat       3*n     Sharded     1       3
twice      2*n     Sharded     2       1
=========  ======  ==========  ======  ====

The terms of the code, in the order in which a reader needs them:

* **unit**: the thing that is divided, here the example. One device has ``n``
  examples (a symbol: the trace does not know the number), and each tower has
  some of them, or none. Data-dependent units, such as the rows that a mask
  keeps, are divided as well.
* **rows**: the number of consecutive rows of a unit. In ``flat`` an example has
  3 rows.
* **blocks**: the number of times that all units repeat along the axis.
  ``twice`` is a block of all examples, followed by another. A tower has its
  rows of both blocks.
* **local**, **whole**: the value on a tower, and the value on one device. The
  local ``loss`` is the sum over the tower's examples, divided by the global
  ``n``. The whole is the sum of the local values.
* **exchange**: an operation that computes a whole from local values, added
  where a whole is needed: ``loss`` and ``gradient`` are summed, because the
  step returns them. Sharded rows would be gathered. The remaining values need
  no exchange.
* **level**: the number of exchanges in sequence before a value. All values
  above are in level 0, and both sums are in level 1. If the step computed
  ``losses - loss``, towers would do this in level 1.
* **known**: entries that are known before the step runs. ``tf.shape(losses)``
  is ``[n]`` on one device, so ``known`` is ``[n]``, although a tower has fewer
  rows. Rules look up axes and sizes in it; ``folding.py`` computes it. Integers
  that are known completely are emitted as constants, or as products of sizes.
* **can_exchange**: whether exchanges are possible. They are not in the body of
  a loop, in a branch, or in a function that XLA compiles apart from the rest:
  if one is needed there, the whole loop, branch or call is computed once.

The objects that most functions take:

* a ``Value``: a tensor of the trace, and its local and whole values;
* a ``Node``: the traced operation that is being laid out;
* a ``Partitioner``: adds operations to the program (as a ``Builder``), converts
  values to other layouts (as a ``Converter``), and applies rules.

The docstring of ``rules`` lists the file of each operation's rule.

``assumed``
  The shapes that the tensors of a program have for an assumed batch.
``builder``
  Builds a program: operations, exchanges, and the sizes that they take.
``compiled_draws``
  Functions that run without XLA, of which XLA compiles the random draws.
``conversions``
  Converts values to the layouts that operations need.
``division``
  Divides an operation along one of its axes, or keeps partial sums partial.
``effects``
  The side effects of operations.
``emission``
  Operations of a program as operations of a TensorFlow graph.
``entry``
  Lays out a traced graph, given the layouts of its inputs.
``folding``
  Folds what is known before a step runs: sizes, axes and numbers.
``gathers``
  When the rows of variables in shards are gathered: late, and again.
``infinities``
  Whether values may be infinite, which sums of products of them depend on.
``kernels``
  What XLA compiles, as the kernels that TensorFlow has registered say.
``layouts``
  How a value of the one-device step is laid out over towers.
``left_out``
  Results of a branch that the other branches leave out.
``lifetimes``
  How many bytes a tower has at a time while it runs a program.
``list_conversions``
  Converts lists of tensors to the layouts that operations need.
``local_step``
  The step of one of several processes that exchange nothing within a step.
``mesh``
  Divides a step over a mesh of two dimensions: the same pass, applied twice.
``partitioner``
  Lays out the trace of the one-device step over towers, in one pass.
``program``
  A step over towers as data: operations, and exchanges between them.
``registry``
  Operations as rules see them, and the rules of each type of operation.
``resources``
  When resources may be read and written, and what variables hold.
``sizes``
  Sizes as exact expressions in the number of examples.
``spans``
  The ranges of axes that slices and splits select, if they are known.
``stackable``
  Lists of tensors that go from one function to another as a stack.
``stages``
  What a level computes with XLA, as functions and single operations in turn.
``undivided``
  Computes what is not divided as one device does, and shares the result.
"""

from keras_towers.partition import rules
from keras_towers.partition.entry import partition_graph
from keras_towers.partition.program import Program

__all__ = ["Program", "partition_graph", "rules"]
