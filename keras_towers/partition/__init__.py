"""One device's step, laid out over towers.

Knows no strategies, no towers and no Keras: it takes a traced graph, and says
what each of several computes of it, what is computed once, and what they
exchange in between.

An example: a dense layer, a softmax, the mean loss and its gradient. Rows of
``x`` and ``labels`` are examples, which towers divide::

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

The words that the code uses, in the order in which a reader needs them:

* **unit**: what is divided, here examples. One device has ``n`` (a symbol: the
  trace does not know the number), and each tower some of them, or none. Other
  units follow from the data, such as the rows that a mask leaves.
* **rows**: how many rows in sequence each unit has. In ``flat`` an example has
  3 of them.
* **blocks**: how often all units follow one another along the axis. ``twice``
  is a block of all examples, and then another; a tower has its rows of both.
* **local**, **whole**: what a tower has of a value, and what one device has.
  ``loss`` has a local part on each tower, of its own examples but divided by
  the ``n`` of all. The whole is the sum of the parts.
* **exchange**: what makes a whole of local values, where somebody needs it:
  ``loss`` and ``gradient`` are summed, because the step returns them. Sharded
  rows would be gathered. All else here needs no exchange.
* **level**: the number of exchanges in sequence before a value. All of this is
  computed in level 0, and both sums are of level 1. If the step went on with
  ``losses - loss``, towers would do this in level 1.
* **known**: entries that are known before the step runs. ``tf.shape(losses)``
  is ``[n]`` on one device, so ``known`` is ``[n]``, though a tower has fewer
  rows. Rules ask it for axes and sizes; ``folding.py`` computes it.
* **meets**: whether towers may exchange values here. In the body of a loop or
  in a branch they may not: if something in there needs an exchange, the whole
  loop or branch is computed once.

Which file has the rule of an operation: see ``rules``.
"""

from keras_towers.partition import rules
from keras_towers.partition.entry import lay_out, partition_graph
from keras_towers.partition.partitioner import UpdateInfo
from keras_towers.partition.program import Program

__all__ = ["Program", "UpdateInfo", "lay_out", "partition_graph", "rules"]
