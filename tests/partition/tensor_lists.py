"""TensorFlow's operations on lists of tensors."""

import tensorflow as tf

from tests.partition.layout.rules.cases.case import raw_op

_FLOATS = {"element_dtype": tf.float32}
list_of = raw_op("TensorListFromTensor")
empty = raw_op("EmptyTensorList", max_num_elements=-1, **_FLOATS)
reserved = raw_op("TensorListReserve", **_FLOATS)
push = raw_op("TensorListPushBack")
pop = raw_op("TensorListPopBack", **_FLOATS)
put = raw_op("TensorListSetItem")
get = raw_op("TensorListGetItem", **_FLOATS)
stack = raw_op("TensorListStack", **_FLOATS)
resized = raw_op("TensorListResize")
picked = raw_op("TensorListGather", **_FLOATS)
scattered = raw_op("TensorListScatterV2")
length_of = raw_op("TensorListLength")
shape_of = raw_op("TensorListElementShape", shape_type=tf.int32)
