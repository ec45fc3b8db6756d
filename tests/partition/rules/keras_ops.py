"""A call of each public operation of Keras on rows along the first axis.

``ONCE`` has those that are computed once, and why.

The name of a parameter says what each row has: x, a vector; i, integers; b,
truth values; c, complex numbers; v, a number; k, an integer; m, a matrix; s, a
signal; p, a picture.
"""

import dataclasses
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
WITHOUT_ROWS = frozenset(
    [
        "arange",
        "bartlett",
        "blackman",
        "convert_to_numpy",
        "custom_gradient",
        "dtype",
        "empty",
        "eye",
        "full",
        "geomspace",
        "hamming",
        "hanning",
        "identity",
        "is_tensor",
        "jvp",
        "kaiser",
        "linspace",
        "logspace",
        "ones",
        "tri",
        "zeros",
    ]
)
# Keras does not trace them on a batch, whoever asks it.
UNTRACED = frozenset(
    [
        "corrcoef",
        "isin",
        "kron",
        "lu_factor",
        "nanmedian",
        "nanpercentile",
        "nanquantile",
        "vectorize",
    ]
)
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
CALLS = {
    "adaptive_average_pool": lambda p: ops.adaptive_average_pool(p, 4),
    "adaptive_max_pool": lambda p: ops.adaptive_max_pool(p, 4),
    "all": lambda b: ops.all(b, -1),
    "any": lambda b: ops.any(b, -1),
    "append": lambda x, x2: ops.append(x, x2, axis=1),
    "argmax": lambda x: ops.argmax(x, -1),
    "argmin": lambda x: ops.argmin(x, -1),
    "argpartition": lambda x: ops.argpartition(x, 2),
    "array_split": lambda x: ops.array_split(x, 2, axis=1),
    "associative_scan": lambda x: ops.associative_scan(ops.add, x, axis=1),
    "average_pool": lambda p: ops.average_pool(p, 2),
    "batch_normalization": lambda x: ops.batch_normalization(
        x, *ops.moments(x, 0), axis=-1
    ),
    "binary_crossentropy": lambda x, x2: ops.binary_crossentropy(x, x2),
    "bincount": lambda i: ops.bincount(i, minlength=4),
    "broadcast_to": lambda x: ops.broadcast_to(x, (3, ops.shape(x)[0], 4)),
    "cast": lambda x: ops.cast(x, "float16"),
    "concatenate": lambda x, x2: ops.concatenate([x, x2], 1),
    "clip": lambda x: ops.clip(x, -0.5, 0.5),
    "cond": lambda x: ops.cond(ops.sum(x) > 0, lambda: x, lambda: -x),
    "conv": lambda p: ops.conv(p, np.ones((3, 3, 3, 5), "float32")),
    "conv_transpose": lambda p: ops.conv_transpose(
        p, np.ones((3, 3, 5, 3), "float32")
    ),
    "corrcoef": lambda x: ops.corrcoef(ops.transpose(x)),
    "correlate": lambda v: ops.correlate(v, np.ones(3, "float32"), "same"),
    "cross": lambda x, x2: ops.cross(x[:, :3], x2[:, :3]),
    "ctc_decode": lambda p: ops.ctc_decode(
        p[:, :, 0], ops.ones(ops.shape(p)[:1], "int32"), "greedy"
    ),
    "ctc_loss": lambda i, p: ops.ctc_loss(
        i,
        p[:, :, 0],
        ops.ones_like(i[:, 0]),
        8 * ops.ones_like(i[:, 0]),
    ),
    "cumprod": lambda x: ops.cumprod(x, 1),
    "cumsum": lambda x: ops.cumsum(x, 1),
    "depth_to_space": lambda p: ops.depth_to_space(
        ops.concatenate([p, p[..., :1]], -1), 2
    ),
    "depthwise_conv": lambda p: ops.depthwise_conv(
        p, np.ones((3, 3, 3, 1), "float32")
    ),
    "diag": lambda v: ops.diag(v),
    "diagonal": lambda m: ops.diagonal(m, axis1=1, axis2=2),
    "diff": lambda x: ops.diff(x, axis=1),
    "digitize": lambda x: ops.digitize(x, np.ones(3, "float32").cumsum()),
    "dot_product_attention": lambda p: ops.dot_product_attention(p, p, p),
    "dsplit": lambda m: ops.dsplit(m, 2),
    "dstack": lambda x, x2: ops.dstack([x, x2]),
    "einsum": lambda x: ops.einsum("...a,b->...ab", x, np.ones(3, "float32")),
    "expand_dims": lambda x: ops.expand_dims(x, 1),
    "extract_sequences": lambda s: ops.extract_sequences(s, 4, 2),
    "fft": lambda x, x2: ops.fft((x, x2)),
    "fft2": lambda m, m2: ops.fft2((m, m2)),
    "flip": lambda x: ops.flip(x, 1),
    "fold": lambda s: ops.fold(ops.stack([s] * 4, -1), (5, 5), (4, 4)),
    "fori_loop": lambda x: ops.fori_loop(0, 3, lambda k, y: y + x, x),
    "gcd": lambda i, i2: ops.gcd(i, i2),
    "get_item": lambda x: ops.get_item(x, (slice(None), 1)),
    "histogram": lambda v: ops.histogram(v, 3, (-1.0, 1.0)),
    "hsplit": lambda x: ops.hsplit(x, 2),
    "hstack": lambda x, x2: ops.hstack([x, x2]),
    "ifft2": lambda m, m2: ops.ifft2((m, m2)),
    "in_top_k": lambda k, x: ops.in_top_k(k, x, 2),
    "irfft": lambda x, x2: ops.irfft((x, x2)),
    "isin": lambda i: ops.isin(i, np.array([1, 2])),
    "istft": lambda m, m2: ops.istft((m[..., :3], m2[..., :3]), 4, 2, 4),
    "kron": lambda x: ops.kron(x, np.ones((2, 2), "float32")),
    "lcm": lambda i, i2: ops.lcm(i, i2),
    "ldexp": lambda x, i: ops.ldexp(x, i),
    "logsumexp": lambda x: ops.logsumexp(x, -1),
    "logdet": lambda m: ops.logdet(m),
    "lstsq": lambda x, v: ops.lstsq(x, v),
    "lu_factor": lambda m: ops.lu_factor(m),
    "map": lambda x: ops.map(ops.sort, x),
    "matmul": lambda x: ops.matmul(x, np.ones((4, 3), "float32")),
    "matrix_rank": lambda m: ops.matrix_rank(m),
    "max_pool": lambda p: ops.max_pool(p, 2),
    "median": lambda x: ops.median(x, -1),
    "meshgrid": lambda v, v2: ops.meshgrid(v, np.ones(3, "float32")),
    "moments": lambda x: ops.moments(x, 0),
    "moveaxis": lambda m: ops.moveaxis(m, 1, 2),
    "multi_hot": lambda i: ops.multi_hot(i, 4),
    "nanargmax": lambda x: ops.nanargmax(x, -1),
    "nanargmin": lambda x: ops.nanargmin(x, -1),
    "nancumprod": lambda x: ops.nancumprod(x, 1),
    "nancumsum": lambda x: ops.nancumsum(x, 1),
    "nanmedian": lambda x: ops.nanmedian(x, -1),
    "nanpercentile": lambda x: ops.nanpercentile(x, 30, -1),
    "nanquantile": lambda x: ops.nanquantile(x, 0.3, -1),
    "one_hot": lambda k: ops.one_hot(k, 4),
    "pad": lambda x: ops.pad(x, ((0, 0), (1, 2))),
    "percentile": lambda x: ops.percentile(x, 30, -1),
    "pinv": lambda m: ops.pinv(m),
    "psnr": lambda x, x2: ops.psnr(x, x2, 1.0),
    "qr": lambda m: ops.qr(m),
    "quantile": lambda x: ops.quantile(x, 0.3, -1),
    "rearrange": lambda x: ops.rearrange(x, "n (a b) -> n b a", a=2),
    "repeat": lambda x: ops.repeat(x, 2, axis=1),
    "reshape": lambda x: ops.reshape(x, (-1, 2, 2)),
    "roll": lambda x: ops.roll(x, 1, axis=1),
    "rot90": lambda m: ops.rot90(m, axes=(1, 2)),
    "saturate_cast": lambda x: ops.saturate_cast(x, "uint8"),
    "scan": lambda x: ops.scan(
        lambda found, y: (found + y, found),
        ops.zeros_like(x[:, 0]),
        ops.transpose(x),
    ),
    "scatter": lambda k, x: ops.scatter(k[:, None], x, (4, 4)),
    "scatter_update": lambda k, x: ops.scatter_update(
        ops.zeros((4, 4)), k[:, None], x
    ),
    "searchsorted": lambda v: ops.searchsorted(
        np.ones(3, "float32").cumsum(), v
    ),
    "segment_max": lambda x, k: ops.segment_max(x, k, 4),
    "segment_min": lambda x, k: ops.segment_min(x, k, 4),
    "segment_prod": lambda x, k: ops.segment_prod(x, k, 4),
    "segment_sum": lambda x, k: ops.segment_sum(x, k, 4),
    "select": lambda b, x: ops.select([b, ~b], [x, -x]),
    "separable_conv": lambda p: ops.separable_conv(
        p, np.ones((3, 3, 3, 1), "float32"), np.ones((1, 1, 3, 5), "float32")
    ),
    "slice": lambda x: ops.slice(x, (0, 1), (ops.shape(x)[0], 2)),
    "slice_update": lambda x: ops.slice_update(x, (0, 1), 2 * x[:, 1:3]),
    "slogdet": lambda m: ops.slogdet(m),
    "solve": lambda m, m2: ops.solve(m, m2),
    "solve_triangular": lambda m, m2: ops.solve_triangular(m, m2),
    "space_to_depth": lambda p: ops.space_to_depth(p, 2),
    "sparse_categorical_crossentropy": lambda k, x: (
        ops.sparse_categorical_crossentropy(k, x)
    ),
    "split": lambda x: ops.split(x, 2, axis=1),
    "squeeze": lambda x: ops.squeeze(x[:, :1], 1),
    "stack": lambda x, x2: ops.stack([x, x2], 1),
    "stft": lambda s: ops.stft(s, 4, 2, 4),
    "svd": lambda m: ops.svd(m),
    "swapaxes": lambda m: ops.swapaxes(m, 1, 2),
    "switch": lambda x: ops.switch(
        ops.cast(ops.sum(x) > 0, "int32"), [ops.exp, ops.sin], x
    ),
    "take": lambda x: ops.take(x, [1, 2], axis=1),
    "take_along_axis": lambda x, i: ops.take_along_axis(x, i, axis=1),
    "tensordot": lambda x: ops.tensordot(x, np.ones((4, 3), "float32"), 1),
    "threshold": lambda x: ops.threshold(x, 0.5, 0.0),
    "tile": lambda x: ops.tile(x, (1, 2)),
    "trace": lambda m: ops.trace(m, axis1=1, axis2=2),
    "trapezoid": lambda x: ops.trapezoid(x, axis=-1),
    "tril": lambda m: ops.tril(m),
    "triu": lambda m: ops.triu(m),
    "unfold": lambda p: ops.unfold(ops.transpose(p, (0, 3, 1, 2)), 2),
    "unique": lambda k: ops.unique(k),
    "unravel_index": lambda k: ops.unravel_index(k, (2, 2)),
    "unstack": lambda x: ops.unstack(x, axis=1),
    "vander": lambda v: ops.vander(v, 3),
    "vectorize": lambda v: ops.vectorize(ops.exp)(v),
    "vectorized_map": lambda x: ops.vectorized_map(ops.sort, x),
    "view_as_complex": lambda x: ops.view_as_complex(x[:, :2]),
    "view": lambda x: ops.view(x, "int32"),
    "vsplit": lambda x: ops.vsplit(x, [1]),
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
    if name not in CALLS:
        return [(letters, getattr(ops, name)) for letters in _TRIED]
    names = inspect.signature(CALLS[name]).parameters
    return [([name[0] for name in names], CALLS[name])]
