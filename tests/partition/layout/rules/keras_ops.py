"""A call of each public operation of Keras on rows along the first axis.

``ONCE`` has those that are computed once, and why.

The name of a parameter says what each row has: x, a vector; i, integers; b,
truth values; c, complex numbers; v, a number; k, an integer; m, a matrix; s, a
signal; p, a picture.
"""

import dataclasses
import functools
import inspect

import numpy as np
from keras import ops

from tests.partition.kit import sharded, trace

_WHOLE = {"dtype": "int32", "low": 0, "high": 3}
_INPUTS = {
    "x": sharded(-1, 4),
    "i": sharded(-1, 4, **_WHOLE),
    "b": sharded(-1, 4, dtype="bool"),
    "c": sharded(-1, 4, dtype="complex64"),
    "v": sharded(-1),
    "k": sharded(-1, **_WHOLE),
    "m": sharded(-1, 4, 4),
    "s": sharded(-1, 16),
    "p": sharded(-1, 8, 8, 3),
}
# What an operation is tried with that has no call below: the first that it
# takes.
_TRIED = ("x", "xx", "i", "ii", "c", "p", "m")

# These take no rows of a batch.
WITHOUT_ROWS = {
    *("arange", "bartlett", "blackman", "convert_to_numpy"),
    *("custom_gradient", "dtype", "empty", "eye", "full", "geomspace"),
    *("hamming", "hanning", "identity", "is_tensor", "jvp", "kaiser"),
    *("linspace", "logspace", "ones", "tri", "zeros"),
}
# Keras does not trace them on a batch, whoever asks it.
UNTRACED = {
    *("corrcoef", "isin", "kron", "lu_factor", "nanmedian"),
    *("nanpercentile", "nanquantile", "vectorize"),
}
_ACROSS = "moves rows to where others were, so that towers would exchange them"
_LOOP = "a loop goes on until all rows have ended"
ONCE = {
    "argpartition": "Keras adds up over the rows, and so mixes them",
    "associative_scan": "Keras reshapes what has no known number of axes",
    "correlate": "each row of the result needs its neighbours",
    "ctc_decode": "the labels of all rows are one sparse tensor",
    "ctc_loss": "the labels of all rows are one sparse tensor",
    "flipud": _ACROSS,
    "fold": "a loop of vectorized_map takes rows of another loop's result",
    "gcd": _LOOP,
    "lcm": _LOOP,
    "lstsq": "all rows are equations of one system",
    "scatter_update": "of two rows with an index the last one counts",
    "unique": "each row is compared with all others",
    "vsplit": _ACROSS,
}
# The letters and the other arguments of calls, and the operations.
_ALIKE = [
    ("x", {"axis": 1}, "all any argmax argmin cumprod cumsum diff expand_dims"),
    ("x", {"axis": 1}, "flip logsumexp median nanargmax nanargmin nancumprod"),
    ("x", {"axis": 1}, "nancumsum nanmedian trapezoid unstack"),
    ("x", {"axis": 1, "q": 30}, "nanpercentile percentile"),
    ("x", {"axis": 1, "q": 0.3}, "nanquantile quantile"),
    ("x", {"axis": 1, "indices_or_sections": 2}, "array_split split"),
    ("x", {"axis": 1, "indices": [1, 2]}, "take"),
    ("x", {"axis": 1, "repeats": 2}, "repeat"),
    ("x", {"axis": 1, "shift": 1}, "roll"),
    ("x", {"dtype": "float16"}, "cast"),
    ("x", {"dtype": "int32"}, "view"),
    ("x", {"dtype": "uint8"}, "saturate_cast"),
    ("x", {"indices_or_sections": 2}, "hsplit"),
    ("x", {"indices_or_sections": [1]}, "vsplit"),
    ("x", {"kth": 2}, "argpartition"),
    ("x", {"pad_width": ((0, 0), (1, 2))}, "pad"),
    ("x", {"repeats": (1, 2)}, "tile"),
    ("x", {"threshold": 0.5, "default_value": 0.0}, "threshold"),
    ("x", {"x_min": -0.5, "x_max": 0.5}, "clip"),
    ("xx", {}, "binary_crossentropy"),
    ("xx", {"axis": 1}, "append"),
    ("xx", {"max_val": 1.0}, "psnr"),
    ("xi", {}, "ldexp"),
    ("xi", {"axis": 1}, "take_along_axis"),
    ("xk", {"num_segments": 4}, "segment_max segment_min segment_prod"),
    ("xk", {"num_segments": 4}, "segment_sum"),
    ("xv", {}, "lstsq"),
    ("i", {"minlength": 4}, "bincount"),
    ("i", {"num_classes": 4}, "multi_hot"),
    ("i", {"test_elements": np.array([1, 2])}, "isin"),
    ("ii", {}, "gcd lcm"),
    ("v", {}, "diag"),
    ("v", {"N": 3}, "vander"),
    ("v", {"bins": 3, "range": (-1.0, 1.0)}, "histogram"),
    ("k", {}, "unique"),
    ("k", {"num_classes": 4}, "one_hot"),
    ("k", {"shape": (2, 2)}, "unravel_index"),
    ("kx", {}, "sparse_categorical_crossentropy"),
    ("kx", {"k": 2}, "in_top_k"),
    ("m", {}, "logdet lu_factor matrix_rank pinv qr slogdet svd tril triu"),
    ("m", {"axes": (1, 2)}, "rot90"),
    ("m", {"axis1": 1, "axis2": 2}, "diagonal swapaxes trace"),
    ("m", {"indices_or_sections": 2}, "dsplit"),
    ("m", {"source": 1, "destination": 2}, "moveaxis"),
    ("mm", {}, "solve solve_triangular"),
    ("s", {"sequence_length": 4, "sequence_stride": 2}, "extract_sequences"),
    (
        "s",
        {"sequence_length": 4, "sequence_stride": 2, "fft_length": 4},
        "stft",
    ),
    ("p", {"block_size": 2}, "space_to_depth"),
    ("p", {"output_size": 4}, "adaptive_average_pool adaptive_max_pool"),
    ("p", {"pool_size": 2}, "average_pool max_pool"),
]
ALIKE = {
    name: (letters, options)
    for letters, options, names in _ALIKE
    for name in names.split()
}


def _ones(*shape):
    return np.ones(shape, "float32")


CALLS = {
    "associative_scan": lambda x: ops.associative_scan(ops.add, x, axis=1),
    "batch_normalization": lambda x: ops.batch_normalization(
        x, *ops.moments(x, 0), axis=-1
    ),
    "broadcast_to": lambda x: ops.broadcast_to(x, (3, ops.shape(x)[0], 4)),
    "concatenate": lambda x, x2: ops.concatenate([x, x2], 1),
    "cond": lambda x: ops.cond(ops.sum(x) > 0, lambda: x, lambda: -x),
    "conv": lambda p: ops.conv(p, _ones(3, 3, 3, 5)),
    "conv_transpose": lambda p: ops.conv_transpose(p, _ones(3, 3, 5, 3)),
    "corrcoef": lambda x: ops.corrcoef(ops.transpose(x)),
    "correlate": lambda v: ops.correlate(v, _ones(3), "same"),
    "cross": lambda x, x2: ops.cross(x[:, :3], x2[:, :3]),
    "ctc_decode": lambda p: ops.ctc_decode(
        p[:, :, 0], ops.ones(ops.shape(p)[:1], "int32"), "greedy"
    ),
    "ctc_loss": lambda i, p: ops.ctc_loss(
        i, p[:, :, 0], ops.ones_like(i[:, 0]), 8 * ops.ones_like(i[:, 0])
    ),
    "depth_to_space": lambda p: ops.depth_to_space(
        ops.concatenate([p, p[..., :1]], -1), 2
    ),
    "depthwise_conv": lambda p: ops.depthwise_conv(p, _ones(3, 3, 3, 1)),
    "digitize": lambda x: ops.digitize(x, _ones(3).cumsum()),
    "dot_product_attention": lambda p: ops.dot_product_attention(p, p, p),
    "dstack": lambda x, x2: ops.dstack([x, x2]),
    "einsum": lambda x: ops.einsum("...a,b->...ab", x, _ones(3)),
    "fft": lambda x, x2: ops.fft((x, x2)),
    "fft2": lambda m, m2: ops.fft2((m, m2)),
    "fold": lambda s: ops.fold(ops.stack([s] * 4, -1), (5, 5), (4, 4)),
    "fori_loop": lambda x: ops.fori_loop(0, 3, lambda k, y: y + x, x),
    "get_item": lambda x: ops.get_item(x, (slice(None), 1)),
    "hstack": lambda x, x2: ops.hstack([x, x2]),
    "ifft2": lambda m, m2: ops.ifft2((m, m2)),
    "irfft": lambda x, x2: ops.irfft((x, x2)),
    "istft": lambda m, m2: ops.istft((m[..., :3], m2[..., :3]), 4, 2, 4),
    "kron": lambda x: ops.kron(x, _ones(2, 2)),
    "map": lambda x: ops.map(ops.sort, x),
    "matmul": lambda x: ops.matmul(x, _ones(4, 3)),
    "meshgrid": lambda v, v2: ops.meshgrid(v, _ones(3)),
    "moments": lambda x: ops.moments(x, 0),
    "rearrange": lambda x: ops.rearrange(x, "n (a b) -> n b a", a=2),
    "reshape": lambda x: ops.reshape(x, (-1, 2, 2)),
    "scan": lambda x: ops.scan(
        lambda found, y: (found + y, found),
        ops.zeros_like(x[:, 0]),
        ops.transpose(x),
    ),
    "scatter": lambda k, x: ops.scatter(k[:, None], x, (4, 4)),
    "scatter_update": lambda k, x: ops.scatter_update(
        ops.zeros((4, 4)), k[:, None], x
    ),
    "searchsorted": lambda v: ops.searchsorted(_ones(3).cumsum(), v),
    "select": lambda b, x: ops.select([b, ~b], [x, -x]),
    "separable_conv": lambda p: ops.separable_conv(
        p, _ones(3, 3, 3, 1), _ones(1, 1, 3, 5)
    ),
    "slice": lambda x: ops.slice(x, (0, 1), (ops.shape(x)[0], 2)),
    "slice_update": lambda x: ops.slice_update(x, (0, 1), 2 * x[:, 1:3]),
    "squeeze": lambda x: ops.squeeze(x[:, :1], 1),
    "stack": lambda x, x2: ops.stack([x, x2], 1),
    "switch": lambda x: ops.switch(
        ops.cast(ops.sum(x) > 0, "int32"), [ops.exp, ops.sin], x
    ),
    "tensordot": lambda x: ops.tensordot(x, _ones(4, 3), 1),
    "unfold": lambda p: ops.unfold(ops.transpose(p, (0, 3, 1, 2)), 2),
    "vectorize": lambda v: ops.vectorize(ops.exp)(v),
    "vectorized_map": lambda x: ops.vectorized_map(ops.sort, x),
    "view_as_complex": lambda x: ops.view_as_complex(x[:, :2]),
    "vstack": lambda x, x2: ops.vstack([x, x2]),
    "while_loop": lambda x: ops.while_loop(
        lambda k, y: k < 3, lambda k, y: (k + 1, y * 2), (0, x)
    ),
}


def public():
    """The names of all public operations, in order."""
    return sorted(
        name
        for name, value in vars(ops).items()
        if inspect.isroutine(value) and not name.startswith("_")
    )


def traced(name):
    """Return the trace of a call of an operation, and its inputs.

    A number of rows that is known is given to what needs it.

    Raises:
        Exception: what Keras raises on one device.
    """
    for letters, function in _calls(name):
        for examples in (None, 6):
            given = [
                dataclasses.replace(_INPUTS[letter], examples=examples)
                for letter in letters
            ]
            try:
                return trace(function, *given), given
            except Exception as error:
                failure = error
    raise failure


def _calls(name):
    """The calls of an operation to try, each with the letters of its inputs."""
    if name in CALLS:
        names = inspect.signature(CALLS[name]).parameters
        return [([name[0] for name in names], CALLS[name])]
    function = getattr(ops, name)
    if name in ALIKE:
        letters, options = ALIKE[name]
        return [(letters, functools.partial(function, **options))]
    return [(letters, function) for letters in _TRIED]
