"""What operations make of rows and of parts of sums, by families.

Where to find the rule of an operation, with some of TensorFlow's names:

* ``batched.py``: matrix products, convolutions, softmax and whatever else is
  done for each of a batch: MatMul BatchMatMulV2 Einsum Conv2D MaxPool
  ResizeBilinear Softmax LogSoftmax TopKV2 Cholesky FFT
  SparseSoftmaxCrossEntropyWithLogits
* ``elementwise.py``: arithmetic and functions of single entries: AddV2 Mul
  RealDiv Relu Exp Cast Equal SelectV2 BiasAdd StringLower Identity
* ``reductions.py``: sums and extremes along axes, and what runs along one: Sum
  Mean Max All ArgMax Cumsum L2Loss BiasAddGrad
* ``means.py``: means over rows, with the variances that follow: Mean
* ``shapes.py``: sizes, and what makes, moves or joins axes: Shape Reshape
  Transpose ExpandDims Squeeze ConcatV2 Pack Unpack Tile BroadcastTo Fill OneHot
  ReverseV2
* ``slices.py``: parts of axes, and zeros around them: StridedSlice Slice Split
  SplitV Pad StridedSliceGrad
* ``indexing.py``: gathers, scatters, segments and sparse matrices: GatherV2
  GatherNd ResourceGather ScatterNd TensorScatterUpdate UnsortedSegmentSum
  SparseTensorDenseMatMul DynamicStitch DenseBincount
* ``places.py``: integers that number rows, such as what a mask leaves: Where
  Range DynamicPartition
* ``ragged.py``: ragged rows: RaggedTensorToTensor
* ``draws.py``: random numbers: StatelessRandomUniformV2
  StatelessRandomNormalV2 StatelessTruncatedNormalV2
* ``control_flow.py``: calls, branches and loops: PartitionedCall If Case While
* ``lists.py``: what loops and branches collect: TensorListReserve
  TensorListSetItem TensorListStack OptionalFromValue

``loops_over_rows.py`` registers none: ``control_flow.py`` asks it first whether
a loop goes round once for each example, as that of ``tf.map_fn`` does.
"""

from keras_towers.partition.rules import (  # noqa: F401
    batched,
    control_flow,
    draws,
    elementwise,
    indexing,
    lists,
    means,
    places,
    ragged,
    reductions,
    shapes,
    slices,
)
