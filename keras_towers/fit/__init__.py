"""The only folder that knows the inside of Keras.

===============  ========================================================
module           what it owns
===============  ========================================================
``hooks``        what is patched in Keras, and what then happens
``patches``      patching, and giving back
``session``      the call of Keras that a thread is in
``interrupts``   Ctrl-C, where a model is half on the towers
``adoption``     re-homing a model onto towers, and back
``trainers``     what a trainer was before, and what it has traced
``building``     creating what a model still lacks
``state``        which variables and optimizers a model has
``variables``    one variable on every tower, and views of one tower
``epochs``       Keras's iterator over batches, for towers
``data``         batches for towers
``step``         one global batch on all towers, exact logs
``tower``        what a tower knows about itself while its step runs
``optimizer``    reduce first, then apply once
``fused``        updates of SGD by one operation a weight
``gradients``    what towers bring to the reduction, and whether they match
``nothing``      calls of Keras whose steps do nothing
``asynchronous`` the train function of towers that wait for nobody
``shared``       what such a tower writes, while others write it too
``crew``         their threads
``staleness``    how much of the others' work their steps have missed
``sharing``      weights that exist once, each on a device of its own
``lockstep``     steps that the processes of a job run together
``agreement``    state that they hold in common
``shards``       data that they read together
``chief``        side effects that only rank 0 is to have
``assignments``  writing weights whose buffers are shared
``losses``       loss denominators over the whole global batch
``metrics``      metrics of one number a batch
===============  ========================================================
"""
