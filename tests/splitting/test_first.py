import tensorflow as tf
from tests.splitting.kit import *
from tests.splitting import kit

def test_some():
    x=kit.rows(-1,4); w=kit.same(4,3)
    print(proven(lambda x,w: tf.matmul(x,w), x, w))
    print(proven(lambda x,w: tf.reduce_mean(tf.nn.relu(x@w)), x, w))
    print(proven(lambda x,w: tf.gradients(tf.reduce_mean(tf.nn.softmax(x@w)[:,0]), w)[0], x, w))
    print(proven(lambda x,w: tf.gradients(tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.ones(tf.shape(x)[0],tf.int32), logits=x@w)), w)[0], x, w))
    print(proven(lambda x: tf.reshape(x,[tf.shape(x)[0],2,2]), x))
    print(proven(lambda x: tf.reshape(x,[-1,2]), x))
    print(proven(lambda x: tf.concat([x,tf.zeros_like(x)],0), x))
    print(refused(lambda x: tf.reduce_max(x), x))
    print(refused(lambda x: x - tf.reduce_mean(x,0), x))
    print(proven(lambda x: tf.reduce_sum(x)/tf.cast(tf.shape(x)[0],tf.float32), x))
    print(proven(lambda x: tf.map_fn(lambda t: t*2., tf.transpose(x)), x))
