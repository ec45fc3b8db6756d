"""A variable with copies, or in shards, does what one on one device does.

The methods are those that TensorFlow's and Keras's classes have: each has a
case, which gives the same on towers, or a reason why it needs none.
"""

import copy
import functools
import operator
import pickle
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt

pytestmark = pytest.mark.alternate

MATRIX = [[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]]
ROWS = tf.IndexedSlices([[2.0, 4.0], [8.0, 1.0]], [0, 2], [3, 2])
TWICE = tf.IndexedSlices([[2.0, 4.0], [8.0, 1.0]], [1, 1], [3, 2])
BATCH = tf.IndexedSlices([[2.0], [4.0], [8.0]], [[0], [1], [0]])
INDICES, UPDATES = [[0], [2]], [[2.0, 4.0], [8.0, 1.0]]

ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
IN_PLACE = ["iadd", "isub", "imul", "itruediv", "ipow"]
LOGIC = ["and", "or", "xor"]


def _binary(name, other, reverse=False):
    function = getattr(operator, name, None) or getattr(operator, f"{name}_")
    if reverse:
        return lambda v: function(other, v)
    return lambda v: function(v, other)


def _binaries(names, other, reverse=False):
    return {
        f"__{'r' * reverse}{name}__": _binary(name, other, reverse)
        for name in names
    }


def _calls(names, *arguments):
    """Cases that call methods with the same arguments."""
    return {
        name: lambda v, name=name: getattr(v, name)(*arguments)
        for name in names.split()
    }


def _values(names):
    return {name: operator.attrgetter(name) for name in names.split()}


def _gradient(v):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v * v) + tf.reduce_sum(v[0])
    return tape.gradient(loss, v)


def _gradient_of_rows(v):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(v, [0, 2]) ** 2)
    gradient = tape.gradient(loss, v)
    return gradient.values, gradient.indices


def _watched(v):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(v)
        loss = tf.reduce_sum(v**2)
    return tape.gradient(loss, [v])[0]


def _arguments(v):
    """A traced function is not that of another variable of this shape."""
    double = tf.function(lambda v: v * 2.0)
    add = tf.function(lambda v: v.assign_add(tf.ones_like(v)))
    return double(tf.Variable(v * 3.0)), double(v), add(v)


def _in_thread(v):
    found = []
    assign = lambda: found.append(np.array(v[0].assign([4.0, 2.0])))  # noqa: E731
    thread = threading.Thread(target=assign)
    thread.start()
    thread.join()
    return found


def _checkpoint(v, path):
    checkpoint = tf.train.Checkpoint(v=v)
    saved = checkpoint.write(path)
    v.assign(v * 0.0)
    checkpoint.read(saved).assert_consumed()
    return v.read_value()


def _exported(v, path):
    module = tf.Module()
    module.v = v
    spec = tf.TensorSpec([], tf.float32)
    module.add = tf.function(lambda x: module.v[0].assign([x, x]), [spec])
    tf.saved_model.save(module, path)
    loaded = tf.saved_model.load(path)
    return loaded.add(9.0), loaded.v


OPERATORS = {
    **_binaries(ARITHMETIC, 3.0),
    **_binaries(ARITHMETIC, 3.0, reverse=True),
    **_binaries(COMPARISONS, 3.0),
    "__abs__": abs,
    "__array__": np.array,
    "__getitem__": lambda v: v[1:, 0],
    "__matmul__": lambda v: v @ tf.ones([2, 1]),
    "__neg__": operator.neg,
    "__repr__": repr,
    "__rmatmul__": lambda v: tf.ones([1, 3]) @ v,
    **_values("dtype name shape trainable constraint"),
    "handle": lambda v: tf.raw_ops.VariableShape(input=v.handle),
    "numpy": lambda v: v.numpy(),
    **_calls("assign assign_add assign_sub", tf.ones([3, 2])),
}
LOGICAL = {
    "__invert__": operator.invert,
    **_binaries(LOGIC, [True, True]),
    **_binaries(LOGIC, [True, True], reverse=True),
}
SCALAR = {"__float__": float, "__int__": int}
REFUSED = {
    "__hash__": hash,
    "a shape": lambda v: v.assign([1.0]),
}

OF_TENSORFLOW = {
    **OPERATORS,
    **_calls("get_shape is_initialized read_value read_value_no_copy value"),
    **_calls(
        "scatter_add scatter_div scatter_max scatter_min scatter_mul "
        "scatter_sub scatter_update",
        ROWS,
    ),
    **_calls(
        "scatter_nd_add scatter_nd_max scatter_nd_min scatter_nd_sub "
        "scatter_nd_update",
        INDICES,
        UPDATES,
    ),
    "__copy__": lambda v: copy.copy(v) is v,
    "__deepcopy__": lambda v: copy.deepcopy(v).assign_add(v),
    "__iter__": list,
    "__reduce__": lambda v: pickle.loads(pickle.dumps(v)),
    "batch_scatter_update": lambda v: v.batch_scatter_update(BATCH),
    "device": lambda v: v.device,
    "experimental_ref": lambda v: v.experimental_ref() == v.ref(),
    "gather_nd": lambda v: v.gather_nd([[0, 1], [2, 0]]),
    "ref": lambda v: v.ref().deref() is v,
    "set_shape": lambda v: v.set_shape([3, 2]),
    "sparse_read": lambda v: v.sparse_read([0, 2]),
    # What else scripts do with variables.
    "add to a row twice": lambda v: v.scatter_add(TWICE),
    "arguments": _arguments,
    "assign a slice": lambda v: v[0].assign([7.0, 8.0]),
    "assign a column": lambda v: v[:, 1].assign([7.0, 8.0, 9.0]),
    "assign twice": lambda v: v.assign(v * 2.0).assign_add(v),
    "assign, not read": lambda v: [v.assign(v * 2.0, read_value=False)][1:],
    "embedding": lambda v: tf.nn.embedding_lookup(v, [2, 0]),
    "gradient": _gradient,
    "gradient of rows": _gradient_of_rows,
    "keras.ops": lambda v: keras.ops.sum(v) + v,
    "print": str,
    "thread": _in_thread,
    "watched": _watched,
}
OF_KERAS = {
    **OPERATORS,
    **_values(
        "aggregation ndim overwrite_with_gradient path regularizer "
        "synchronization value"
    ),
    "__pos__": operator.pos,
    "__round__": round,
    "a slice": lambda v: v.value[0].assign([7.0, 8.0]),
    "deepcopy": lambda v: copy.deepcopy(v).assign_add(v),
    "gradient": _gradient,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "rows": lambda v: v.value.scatter_nd_add(INDICES, UPDATES),
    "thread": lambda v: _in_thread(v.value),
}
REASONS = {
    "of graphs that a session runs": "SaveSliceInfo count_up_to create eval "
    "from_proto graph initial_value initialized_value initializer load op "
    "to_proto",
    "of Python 2": "__div__ __idiv__ __irealdiv__ __long__ __nonzero__ "
    "__rdiv__",
    "of the class": "__abstractmethods__ __annotations__ __array_priority__ "
    "__composite_gradient__ __dict__ __module__ __weakref__",
    "how TensorFlow combines what replicas write": "aggregation "
    "synchronization",
    "see the case 'arguments'": "__tf_tracing_type__",
    "what every operation calls": "__tf_tensor__",
    # Pickling adds it to a class.
    "of the module copyreg": "__slotnames__",
}


def _cases(kind, folder):
    """The cases of a kind of variable: the first value, and what is done."""
    refused, scalar = dict(REFUSED), dict(SCALAR)
    if kind == "keras.Variable":
        of_matrix = OF_KERAS
        refused["__bool__"] = bool
    else:
        files = [str(folder / name) for name in ("checkpoint", "exported")]
        of_matrix = {
            **OF_TENSORFLOW,
            "checkpoint": lambda v: _checkpoint(v, files[0]),
            "export": lambda v: _exported(v, files[1]),
        }
        scalar |= {"__bool__": bool, "__complex__": complex}
        refused |= _binaries(IN_PLACE, 2.0)
    return {
        **{name: (MATRIX, case) for name, case in of_matrix.items()},
        **{name: (MATRIX, case) for name, case in refused.items()},
        **{name: ([True, False], case) for name, case in LOGICAL.items()},
        **{name: (2.0, case) for name, case in scalar.items()},
    }, refused


def _plain(value):
    """What can be compared of a result."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (tf.Tensor, tf.Variable, keras.Variable, np.ndarray)):
        return value.dtype, np.array(value).tolist()
    return value


def _copies(variable):
    held = getattr(variable, "_value", variable)
    return list(getattr(held, "values", [held]))


def _outcome(case, variable, in_function=False):
    """The result of a case, or its error, and the new value of all copies."""
    call = functools.partial(case, variable)
    if in_function:
        call = tf.function(lambda: case(variable), autograph=False)
    try:
        result = _plain(call())
    except Exception as error:
        result = type(error)
    first, *others = [part.numpy().tolist() for part in _copies(variable)]
    assert others in ([], [first]), "the copies differ"
    return result, first


MAKERS = {
    "tf.Variable": lambda v: tf.Variable(v, name="name"),
    "value": lambda v: keras.Variable(v, name="name").value,
    "keras.Variable": lambda v: keras.Variable(v, name="name"),
}


COPIES, SHARDS = {"updates": "each"}, {"weights": "sharded"}


@pytest.mark.parametrize(
    ("kind", "options", "in_function"),
    [
        *((kind, COPIES, False) for kind in MAKERS),
        ("tf.Variable", COPIES, True),
        ("value", SHARDS, False),
        ("keras.Variable", SHARDS, False),
        ("value", SHARDS, True),
    ],
)
def test_every_method_does_what_it_does_on_one_device(
    kind, options, in_function, tmp_path, small_shards
):
    make = MAKERS[kind]
    cases, refused = _cases(kind, tmp_path)
    if in_function:
        writes = ("assign", "scatter", "add", "gradient", "arguments")
        cases = {
            name: case
            for name, case in cases.items()
            if any(word in name for word in writes)
        }
    if options == SHARDS:
        # Its handle is that of the shards in a step, and has no memory.
        cases.pop("handle", None)
    wanted = {
        name: _outcome(case, make(value), in_function)
        for name, (value, case) in cases.items()
    }
    errors = {
        n for n, (result, _) in wanted.items() if isinstance(result, type)
    }
    assert errors == set(refused) or in_function
    found = {}
    with kt.TowerStrategy(2, **options):
        for name, (value, case) in cases.items():
            variable = make(value)
            held = getattr(variable, "_value", variable)
            if options == COPIES:
                assert len(held.values) == 2
            elif np.ndim(value):
                assert len(held.shards) == 2
            try:
                found[name] = _outcome(case, variable, in_function)
            except AssertionError as error:
                found[name] = str(error)
    wrong = {n: (found[n], w) for n, w in wanted.items() if found[n] != w}
    assert not wrong


@pytest.mark.parametrize("kind", ["tf.Variable", "keras.Variable"])
def test_every_method_has_a_case_or_a_reason(kind, tmp_path):
    with_case = set(_cases(kind, tmp_path)[0])
    cls = type(MAKERS[kind](MATRIX))
    public = {n for n in dir(cls) if n[0] != "_" or n.endswith("__")}
    inherited = set(dir(object)) - {"__repr__"}
    without_case = set(" ".join(REASONS.values()).split())
    assert public - inherited - with_case - without_case == set()
