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

The modules, in the order in which to read them: each imports only those before
it. From ``sizes`` to ``nodes`` are the objects. From ``spans`` to
``traced_graph`` is the pass, and ``rules`` come before its last module. Then
follows what is done with a program.

``sizes``
  Symbolic sizes: exact expressions in the number of examples.
``axes``
  Axes of variation: ranks, towers, columns and micro-batches of a value.
``program``
  A program: a step over towers as operations and exchanges between them.
``reasons``
  The reasons why an operation is not divided.
``builder``
  Builds a program: adds operations, exchanges and computations of sizes.
``layouts``
  Layouts: how towers hold a value of the one-device step.
``values``
  Values of the one-device step: their layouts, and what is known of them.
``registry``
  The registry of operations: one row of facts for each type.
``units``
  Units: what rows are counted in, and the sizes that follow from them.
``paired_variances``
  Pairs of a mean and a variance in a graph, which one exchange computes.
``conversions``
  Converts values to the layouts that operations need.
``list_conversions``
  Converts lists of tensors to the layouts that operations need.
``resources``
  The order of reads and writes of resources, and the values of variables.
``nodes``
  Nodes: the traced operations as rules see them, and their scope.
``spans``
  The ranges of axes that slices and splits select, as far as known.
``folding``
  Constant folding, of numbers, sizes and axes that are known before a step.
``division``
  Divides an operation along an axis, or applies it to partial sums.
``effects``
  The side effects of operations, such as writes, prints and draws.
``undivided``
  Computes an operation once, as one device does, and shares the result.
``column_exchanges``
  Exchanges between columns of a mesh, as operations in a column's graph.
``layout_pass``
  Lays out the trace of the one-device step over towers, in one pass.
``estimated_work``
  Estimates the work of an operation from the sizes of its tensors.
``list_memory``
  Which lists of a loop have the same tensors in memory.
``tensor_sizes``
  The sizes of a program's tensors, for an assumed batch.
``layout_choice``
  Choice between two layouts of a step by their estimated cost.
``traced_graph``
  Reads a traced graph, with the layouts of its inputs, into a program.
``timeline``
  A timeline: when a program computes and exchanges what.
``gathers``
  When a step gathers weights in shards, within ``gather_bytes``.
``called_functions``
  The functions that operations call: a program's own, or traced ones by name.
``kernels``
  The operations that XLA compiles, by the kernels registered in TensorFlow.
``compiled_draws``
  Random draws that XLA compiles, in functions that it does not.
``emission``
  Adds the operations of a program to a TensorFlow graph.
``stackable``
  Lists of tensors that pass between functions as a stack.
``xla_pieces``
  Divides a level into functions that XLA compiles, and single operations.
``mesh``
  Divides a step over a mesh of two dimensions: the layout pass runs twice.
``memory_estimate``
  An estimate of the memory of a tower at each time of a step.
``local_step``
  The step of one of several processes that exchange nothing within a step.
``gradient_buckets``
  Buckets of gradients, which towers exchange during the backward pass.
``segments``
  Divides a step into segments that are recomputed.
``kept_results``
  Chooses the results to keep, rather than recompute.
``rematerialization``
  Rematerialization: recomputes activations instead of keeping them.
``schedule``
  The schedule: in which order a program's operations run.
"""

from keras_towers.partition import rules
from keras_towers.partition.program import Program
from keras_towers.partition.traced_graph import partition_graph

__all__ = ["Program", "partition_graph", "rules"]
