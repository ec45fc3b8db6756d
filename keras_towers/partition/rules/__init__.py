"""The rules of operations, by families.

The file of an operation's rule, with some of TensorFlow's names:

* ``batched.py``: matrix products, convolutions, softmax, and other operations
  on each item of a batch: MatMul BatchMatMulV2 Einsum Conv2D MaxPool
  SpaceToBatchND ResizeBilinear Softmax LogSoftmax TopKV2 Cholesky FFT
  SparseSoftmaxCrossEntropyWithLogits
* ``elementwise.py``: arithmetic and functions of single entries: AddV2 Mul
  RealDiv Relu Exp Cast Equal SelectV2 BiasAdd StringLower Identity
* ``reductions.py``: sums, means, variances (of BatchNormalization, too),
  extremes and cumulative sums: Sum Mean Max All ArgMax Cumsum L2Loss
  BiasAddGrad
* ``shapes.py``: shapes, and new, moved or joined axes: Shape Reshape Transpose
  ExpandDims Squeeze ConcatV2 Pack Unpack Tile BroadcastTo Fill OneHot ReverseV2
* ``slices.py``: slices, splits and padding: StridedSlice Slice Split SplitV Pad
  StridedSliceGrad
* ``indexing.py``: gathers, scatters, segments and sparse matrices: GatherV2
  GatherNd ScatterNd TensorScatterUpdate UnsortedSegmentSum
  SparseTensorDenseMatMul DynamicStitch DenseBincount
* ``row_numbers.py``: integers that refer to rows, as of a mask or of words:
  Where Range DynamicPartition StringSplitV2 SparseCross
* ``ragged.py``: ragged rows: RaggedTensorToTensor RaggedGather RaggedBincount
  RaggedCountSparseOutput RaggedRange StringNGrams UnicodeDecode UnicodeEncode
* ``row_splits.py``: where ragged rows begin and end, and their lengths: Sub
* ``draws.py``: random numbers: StatelessRandomUniformV2 StatelessRandomNormalV2
  StatelessTruncatedNormalV2
* ``mesh_columns.py``: exchanges among columns of a mesh, in the graph of one of
  them: PartitionedCall
* ``control_flow.py``: calls, of a mean of the rows of one's own too, and
  branches: PartitionedCall If Case
* ``loops.py``: loops, also with one round for each example (``row_loops.py``),
  as in ``tf.map_fn``: While
* ``variables.py``: reads, writes and look-ups: ReadVariableOp AssignVariableOp
  ResourceGather LookupTableFindV2
* ``lists.py``: lists of tensors in loops, and optionals: TensorListReserve
  TensorListSetItem TensorListStack OptionalFromValue

``batched``
  Operations on each item of a batch: images, matrices, distributions.
``control_flow``
  Calls of functions, branches, and what all loops are laid out with.
``draws``
  Random numbers from a seed: each tower draws the numbers of its rows.
``elementwise``
  Elementwise operations: arithmetic, choices and functions.
``indexing``
  Gathers, scatters, segments and sparse matrices.
``lists``
  Lists of tensors in loops, and optional values in branches.
``loops``
  Loops that towers run, in one of two ways.
``ragged``
  Ragged rows, whose entries are those between two row splits.
``reductions``
  Sums, means and extremes along axes, and cumulative operations.
``row_loops``
  Loops of which a tower runs the rounds of its rows.
``row_numbers``
  Integers that refer to rows: row numbers.
``row_splits``
  Row splits: where the rows of a ragged tensor begin and end.
``shapes``
  Shapes, and operations that create, move, join or split axes.
``slices``
  Slices, splits and padding.
``variables``
  Reads, writes and lookups of variables, such as tables of embeddings.
``mesh_columns``
  Exchanges with the other columns of a mesh, in the graph of one column.
"""

import importlib
import pkgutil

# Each module registers its rules. Of several for an operation the first that
# applies counts, so their order in a module matters.
for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
