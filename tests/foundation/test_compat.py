"""A missing or unsuitable TensorFlow or Keras gives one clear error."""

import ast
import dis
import importlib
import inspect
import pathlib
import re
import tomllib
from importlib import metadata

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import keras_patches
from keras_towers.foundation import compat
from keras_towers.foundation.import_hooks import minor_version
from keras_towers.strategies import keras_distribution
from tests.kit import scripts

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "path",
    [
        "keras.src.backend.gone:TensorFlowTrainer",
        "tensorflow.python.distribute.values:PerReplica.gone",
    ],
)
def test_a_missing_name_is_named_with_the_versions_that_work(path):
    with pytest.raises(kt.CompatibilityError) as error:
        compat.private_name(path)
    # It may be keras-nightly.
    package = metadata.packages_distributions()["keras"][0]
    version = f"{package} {keras.__version__}"
    for part in (path, version, compat.tested_versions(), "install"):
        assert part in str(error.value)
    assert isinstance(error.value, ImportError)


def test_a_name_is_taken_from_the_first_place_that_has_it():
    found = compat.private_name("keras:gone keras:Model keras:Layer")
    assert found is keras.Model
    with pytest.raises(kt.CompatibilityError, match="keras:gone or keras.gone"):
        compat.private_name("keras:gone keras.gone:Model")


@pytest.mark.parametrize("item", [(4, "data"), (4, 6, "data")])
def test_an_execution_is_what_each_version_of_keras_yields(item):
    assert compat.execution_of(item, 3) == (4, 6, "data")


def test_the_versions_are_those_that_pyproject_and_the_readme_name():
    project = tomllib.loads((scripts.ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    declared = (
        project["project"]["dependencies"] + extras["cpu"] + extras["gpu"]
    )
    readme = (scripts.ROOT / "README.md").read_text()
    for name, (first, last) in compat.TESTED_VERSIONS.items():
        major, minor = last.split(".")
        bounds = f">={first},<{major}.{int(minor) + 1}"
        ours = [d for d in declared if d.startswith(name.lower())]
        assert ours and all(d.endswith(bounds) for d in ours), (name, ours)
        assert f"{name} {first} to {last}" in " ".join(readme.split())


PACKAGE = pathlib.Path(kt.__file__).parent
# Ours, of Python, other packages and graphs; and parts of words.
OTHERS = {
    "_never_stops",
    *("_allreduce", "_class", "_exit", "_getframe", "_host_manager"),
    *("_noinline", "_reducescatter", "_replace", "_s", "_self_", "_storage"),
    *("_XlaMustCompile", "_DummyThread"),
    *("_batch_begin", "_batch_end", "_on_batch", "_use_cached_eval_dataset"),
}


# Where objects are, as ``private_name`` takes it; below each, the attributes
# that the package uses or replaces, and from which version of Keras on.
NAMES = {}
_LISTED = pathlib.Path(__file__).with_name("private_names.txt").read_text()
for line in _LISTED.splitlines():
    if line.startswith(" "):
        NAMES[[*NAMES][-1]] += line.split()
    else:
        NAMES[line.strip()] = []
# Without the versions.
TABLE = {
    path: {name.partition(">=")[0] for name in names}
    for path, names in NAMES.items()
}


def is_there(owner, name):
    return hasattr(owner, name) or any(map(sets(name), codes_of(owner)))


def codes_of(owner):
    """The code of a class and its bases, with what is defined inside."""
    found = [
        getattr(function_of(value), "__code__", None)
        for cls in getattr(owner, "__mro__", ())
        for value in vars(cls).values()
    ]
    for code in found:
        if code is not None:
            found += [c for c in code.co_consts if inspect.iscode(c)]
            yield code


def function_of(value):
    """The function of a method or of a property's getter or setter."""
    if isinstance(value, property):
        value = value.fset or value.fget
    return inspect.unwrap(getattr(value, "__func__", value))


def sets(name):
    """Whether code sets an attribute."""
    return lambda code: (
        name in code.co_names
        and any(
            step.opname == "STORE_ATTR" and step.argval == name
            for step in dis.get_instructions(code)
        )
    )


@pytest.mark.parametrize("path", NAMES)
def test_the_attributes_that_are_used_are_there(path):
    owner = compat.private_name(path)
    wanted = [
        name
        for name, _, since in (each.partition(">=") for each in NAMES[path])
        if minor_version(since or "0") <= compat.KERAS
    ]
    assert [name for name in wanted if not is_there(owner, name)] == []


def test_an_attribute_that_no_method_sets_is_missing(monkeypatch):
    kind = keras.optimizers.RMSprop
    assert is_there(kind, "_momentums") and not is_there(kind, "_gone")
    monkeypatch.setattr(kind, "build", lambda self: None)
    assert not is_there(kind, "_momentums")


def is_private(name):
    return name.startswith("_") and name.isidentifier() and name[1:2] != "_"


def is_of_fit(path):
    return path.relative_to(PACKAGE).parts[0] == "fit"


def test_every_private_name_that_is_used_is_in_the_table():
    used, ours = {}, set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    ours.add(name)
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                    ours.add(name)
                case ast.Attribute(
                    attr=name, value=ast.Name(id="self"), ctx=ast.Store()
                ):
                    ours.add(name)
                case ast.Attribute(attr=name):
                    used[name] = path
                case ast.Constant(value=str(name)) if is_of_fit(path):
                    used[name] = path
                case ast.ImportFrom(module=str(name)):
                    private = ("keras.src", "tensorflow.python")
                    assert not name.startswith(private), path
    table = set().union(*TABLE.values())
    source = pathlib.Path(compat.__file__).read_text()
    table |= {*re.findall(r":([\w]+)", source + "\n".join(TABLE))}
    unknown = {*filter(is_private, used)} - ours - table - OTHERS
    assert not {name: used[name] for name in unknown}


def classes_of_the_package():
    for path in PACKAGE.rglob("[a-z]*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        try:
            module = importlib.import_module(name)
        except kt.TowerError:  # An engine that is not installed.
            continue
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == name:
                yield cls


def test_every_private_name_that_a_class_overrides_is_in_the_table():
    """If one were renamed, ours would never be called."""
    overridden = {
        name: cls
        for cls in classes_of_the_package()
        for base in cls.__mro__[1:]
        if base.__module__.startswith(("keras.", "tensorflow."))
        for name in filter(is_private, vars(cls).keys() & vars(base).keys())
    }
    table = set().union(*TABLE.values())
    assert not overridden.keys() - table - {"_abc_impl"}, overridden


def test_every_name_that_is_replaced_is_in_the_table():
    owners = [(compat.private_name(p), names) for p, names in TABLE.items()]
    for owner, name, _ in keras_patches._PATCHES:
        assert any(found is owner and name in n for found, n in owners), name


def test_keras_can_be_imported_where_nothing_fits(monkeypatch, caplog):
    def connect():
        raise kt.CompatibilityError("no such name")

    monkeypatch.setattr(keras_distribution, "connect", connect)
    kt._connect()
    assert "not connected to towers" in caplog.text
    assert "no such name" in caplog.text


def test_the_batch_size_of_a_dataset_is_what_it_was_told():
    data = tf.data.Dataset.range(9)
    batched = data.batch(4, num_parallel_calls=2).map(lambda x: x).prefetch(1)
    sizes = [compat.batch_size_of(d) for d in (data, data.batch(3), batched)]
    assert sizes == [None, 3, 4]


def test_what_batches_all_parts_of_a_dataset():
    batched = tf.data.Dataset.range(9).batch(4)
    kept = batched.repeat().shuffle(3).take(8).with_options(tf.data.Options())
    assert compat.batches_all_parts(kept.prefetch(1))
    assert not compat.batches_all_parts(kept.map(lambda x: x))
    assert not compat.batches_all_parts(tf.data.Dataset.range(9).take(2))


def test_single_device_mode_hides_the_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    seen = []

    @tf.function
    def traced(flag):
        def branch():
            seen.append(tf.distribute.has_strategy())
            return 1.0

        with compat.single_device_mode():
            return tf.cond(flag, branch, branch)

    with strategy.scope():
        traced(tf.constant(True))
        assert seen == [False, False]
        with compat.single_device_mode():
            assert tf.distribute.get_replica_context() is not None
            variable = tf.Variable(1.0)
            assert not isinstance(variable, compat.DistributedVariable)
        assert tf.distribute.get_strategy() is strategy
        assert isinstance(tf.Variable(1.0), compat.DistributedVariable)


def test_a_seed_of_a_block_leaves_draws_outside_as_they_are():
    def drawn(between=lambda: None):
        tf.random.set_seed(3)
        first = float(tf.random.uniform(()))
        between()
        return first, float(tf.random.uniform(()))

    def block():
        with compat.global_seed_of(5):
            inside.append(float(tf.random.uniform(())))

    inside = []
    assert drawn() == drawn(block) == drawn(block)
    assert inside[0] == inside[1]


@pytest.mark.optimized
@pytest.mark.parametrize(
    "constant", [1.5, np.zeros(0), np.zeros((0, 3)), np.ones(3), np.array(True)]
)
def test_what_is_unknown_is_computed_in_each_step_and_for_each_operation(
    constant,
):
    """By operations that say of no effects, as those that send."""
    seen = []

    def send(value):
        seen.append(value)
        return value

    def sent(tensor):
        return tf.numpy_function(send, [tensor], tensor.dtype, stateful=False)

    def runs_of(hide):
        @tf.function(autograph=False)
        def step():
            given = tf.constant(constant)
            return [tf.identity(sent(hide(given))) for _ in range(2)]

        seen.clear()
        for _ in range(3):
            for result in step():
                np.testing.assert_array_equal(result, constant)
        return len(seen)

    # TensorFlow does compute constants before a step.
    assert runs_of(lambda tensor: tensor) < 6
    assert runs_of(compat.unknown) == 6


def test_a_compact_graph_has_each_small_constant_once():
    graph, eager = compat.CompactGraph("compact"), tf.ones(2)
    with graph.as_default():
        first = tf.constant([1, 2])
        with tf.control_dependencies([tf.random.uniform([])]):
            again, real = tf.constant([1, 2]), tf.constant([1.0, 2.0])
            late = again + 1
        with tf.device("/device:CPU:1"):
            elsewhere = tf.constant([1, 2])
        # They become inputs of the function, which are different ones.
        captured = [graph.capture(t) for t in (eager, tf.identity(eager))]
        ones = tf.constant([1.0, 1.0])
    assert again is first and not first.op.control_inputs
    assert elsewhere.device.endswith("CPU:1") and not first.device
    assert late.op.control_inputs
    different = [first, real, elsewhere, ones, *captured]
    assert len({id(tensor) for tensor in different}) == 6


def test_graphs_of_called_functions_are_not_made_anew():
    """TensorFlow cannot make all of them from their definitions."""
    inner = tf.function(lambda x: x + 1.0)
    outer = tf.function(lambda x: inner(x) * 2.0)
    graph = outer.get_concrete_function(tf.constant(1.0)).graph
    (function,) = graph._functions.values()
    assert compat.graphs_called_by(graph) == [function.graph]
    function._cached_graph = None
    assert compat.graphs_called_by(graph) == []
