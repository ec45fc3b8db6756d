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
* **round**: exchanges that travel together, here both sums.
* **level**: the operations of a step between two rounds; level 0 is before the
  first. All values above are computed in level 0, and the round follows it. If
  the step computed ``losses - loss``, towers would do this in level 1.
* **known**: entries that are known before the step runs. ``tf.shape(losses)``
  is ``[n]`` on one device, so ``known`` is ``[n]``, although a tower has fewer
  rows. Rules look up axes and sizes in it; ``folding.py`` computes it. Integers
  that are known completely are emitted as constants, or as products of sizes.
* **can_exchange**: whether exchanges are possible. They are not in the body of
  a loop, in a branch, or in a function that XLA compiles apart from the rest:
  if one is needed there, the whole loop, branch or call is computed once.

The objects that functions take, each with what only it keeps:

* a ``Value``: a tensor of the trace, and its local and whole values;
* a ``Builder``: the operations and exchanges that are added to the program, or
  to a function that towers call;
* ``Units``: what is divided, and the sizes that symbols stand for;
* a ``Converter``: the other layouts that values were converted to;
* ``VariableContents``: what variables hold, and who uses them in which order;
* a ``Scope``: these four, for the graph or the function that is being laid out,
  and the values of its tensors. The scope of a function is made from that of
  its caller;
* a ``Node``: the traced operation that is being laid out, in its scope. A rule
  takes it, and the values of its inputs, and returns those of its outputs.

The rooms, in the order in which to read them: each imports only those before
it, and ``mesh`` and ``emission`` import all of them.

``ir``
  A step as a program: operations, tensors, exchanges, and facts about both.
``layout``
  The layout of a step: which tower computes which part of each value.
``timeline``
  When a step computes and exchanges what, and the memory that this takes.
``xla``
  What XLA compiles of a step, and what it cannot compile.
``emission``
  Adds the operations of a program to a TensorFlow graph.
``mesh``
  Divides a step over a mesh of two dimensions: the layout pass runs twice.
"""

from keras_towers.partition.ir.program import Program
from keras_towers.partition.layout import rules
from keras_towers.partition.layout.conversions import LayoutOptions
from keras_towers.partition.layout.traced_graph import partition_graph
from keras_towers.partition.mesh import partition_over_mesh

__all__ = [
    "LayoutOptions",
    "Program",
    "partition_graph",
    "partition_over_mesh",
    "rules",
]
