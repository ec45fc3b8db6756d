"""python -m tests.exactness.strangers.run [variant] [names...]: a table of all cases."""

import logging, sys, time, traceback, warnings, os, re
import keras_towers as kt

kt.virtual_towers(3)
from tests.kit import untuned
import keras, numpy as np, tensorflow as tf
from tests.exactness.strangers.base import CASES
import importlib, pkgutil, tests.exactness.strangers as package

for m in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
    if m.name not in ("run", "base"):
        importlib.import_module("tests.exactness.strangers." + m.name)

untuned.leave_untuned()


class Catch(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, r):
        if r.levelno >= logging.WARNING:
            self.lines.append(r.getMessage())


catch = Catch()
logging.getLogger("keras_towers").addHandler(catch)
logging.getLogger("keras_towers").setLevel(logging.INFO)


def optimizers(model):
    found, seen = [], set()
    for _, v in sorted(vars(model).items(), key=lambda p: p[0]):
        if isinstance(v, keras.optimizers.Optimizer) and id(v) not in seen:
            seen.add(id(v))
            found.append(v)
    return found


def train(name, strategy, variant=None):
    import contextlib

    function, options = CASES[name]
    keras.backend.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(11)
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    model, x, y = function()
    fit = dict(epochs=2, verbose=0, shuffle=False)
    predict = x
    if isinstance(x, tf.data.Dataset):
        fit["x"] = x
    else:
        fit.update(x=x, y=y, batch_size=options.get("batch", 13))
    fit.update(options.get("fit", {}))
    if variant == "batches" and "batch_size" in fit:
        fit["batch_size"] = 4 if strategy is not None else 12
    if variant == "spe":
        model.steps_per_execution = 2
    if variant == "jit":
        model.jit_compile = True
    if variant == "eager":
        model.run_eagerly = True
    if variant == "unknown" and not isinstance(x, tf.data.Dataset):
        sw = fit.pop("sample_weight", None)
        if fit.get("class_weight") is None and sw is None:
            bs = fit.pop("batch_size")
            fit.pop("y")
            fit["x"] = (
                tf.data.Dataset.from_tensor_slices(
                    (x, y) if y is not None else (x,)
                )
                .batch(bs)
                .filter(lambda *a: True)
            )
            fit["steps_per_epoch"] = None
    if strategy is None:
        context = contextlib.nullcontext()
    else:
        context = strategy
    out = {}
    first = []

    class Time(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.t = time.time()

        def on_train_batch_end(self, batch, logs=None):
            if not first:
                first.append(time.time() - self.t)

    if callable(x):
        with context:
            out.update(x(model))
        return state_of(model, out), 0, model
    with context:
        h = model.fit(
            callbacks=[Time(), *(c() for c in options.get("callbacks", ()))],
            **fit,
        )
        for k, v in h.history.items():
            out["history/" + k] = np.array(v)
        if options.get("evaluate", True):
            e = {
                k: v
                for k, v in fit.items()
                if k in ("x", "y", "batch_size", "sample_weight")
            }
            r = model.evaluate(verbose=0, return_dict=True, **e)
            for k, v in r.items():
                out["evaluate/" + k] = np.array(v)
        if options.get("predict", True):
            px = x.map(lambda *a: a[0]) if isinstance(x, tf.data.Dataset) else x
            p = model.predict(
                px,
                batch_size=None
                if isinstance(x, tf.data.Dataset)
                else fit.get("batch_size", 13),
                verbose=0,
            )
            for i, v in enumerate(tf.nest.flatten(p)):
                if isinstance(v, tf.RaggedTensor):
                    v = v.to_tensor()
                if isinstance(v, tf.SparseTensor):
                    v = tf.sparse.to_dense(v)
                out[f"predict/{i}"] = np.array(v)
    return state_of(model, out), first[0] if first else 0, model


def state_of(model, out):
    for i, v in enumerate(model.variables):
        out[f"variable/{i}/{v.path}"] = v.value.numpy()
    for i, o in enumerate(optimizers(model)):
        for j, v in enumerate(o.variables):
            out[f"optimizer{i}/{j}/{v.name}"] = v.value.numpy()
    for k, v in vars(model).items():
        if isinstance(v, tf.Variable) and v.dtype != tf.string:
            out["tf/" + k] = v.numpy()
        if isinstance(v, tf.Variable) and v.dtype == tf.string:
            out["tf/" + k] = np.array(v.numpy())
        if isinstance(v, tf.lookup.experimental.MutableHashTable):
            a, b = v.export()
            o = np.argsort(a.numpy())
            out["table/" + k] = b.numpy()[o]
    if hasattr(model, "outcome"):
        out.update(model.outcome())
    return out


def compare(name, a, b):
    options = CASES[name][1]
    rtol, atol = options.get("rtol", 1e-4), options.get("atol", 1e-5)
    bad = []
    if list(a) != list(b):
        bad.append(f"other names: {sorted(set(a) ^ set(b))}")
    for k in a:
        if k not in b:
            continue
        u, v = a[k], b[k]
        if u.dtype.kind in "OSU":
            if not np.array_equal(u, v):
                bad.append(f"{k}: strings differ")
            continue
        if u.shape != v.shape:
            bad.append(f"{k}: shape {u.shape} {v.shape}")
            continue
        if u.dtype != v.dtype:
            bad.append(f"{k}: dtype {u.dtype} {v.dtype}")
            continue
        if u.dtype.kind not in "fiubc":
            u, v = u.astype("float32"), v.astype("float32")
        if not np.allclose(u, v, rtol, atol, equal_nan=True):
            if u.dtype.kind == "b":
                bad.append(k)
                continue
            d = (
                np.max(np.abs(u.astype("float64") - v.astype("float64")))
                if u.dtype.kind != "c"
                else np.max(np.abs(u - v))
            )
            bad.append(f"{k}: {d:.1e} of {np.max(np.abs(u)):.1e}")
    nans = [
        k for k, u in a.items() if u.dtype.kind == "f" and np.isnan(u).any()
    ]
    return bad, nans


STRATEGIES = {
    None: lambda: kt.TowerStrategy(),
    "spe": lambda: kt.TowerStrategy(),
    "jit": lambda: kt.TowerStrategy(),
    "eager": lambda: kt.TowerStrategy(),
    "unknown": lambda: kt.TowerStrategy(),
    "micro": lambda: kt.TowerStrategy(micro_batches=2),
    "updates": lambda: kt.TowerStrategy(updates="each"),
    "sharded": lambda: kt.TowerStrategy(updates="sharded"),
    "ps": lambda: kt.ParameterServerTowerStrategy(),
    "batches": lambda: kt.TowerStrategy(batches="each"),
}


def main():
    args = sys.argv[1:]
    variant = args.pop(0) if args and args[0] in STRATEGIES else None
    share = None
    warnings.simplefilter("ignore", DeprecationWarning)
    names = list(CASES)
    if args and re.fullmatch(r"\d+/\d+", args[0]):
        i, n = map(int, args.pop(0).split("/"))
        names = names[i::n]
    if args:
        names = [n for n in names if any(re.search(a, n) for a in args)]
    plain_only = os.environ.get("PLAIN")
    good = 0
    for name in names:
        t0 = time.time()
        try:
            a, ta, _ = train(name, None, variant)
            bad0, nans = compare(name, a, a)
        except Exception as e:
            print(
                f"PLAINFAIL {name}: {type(e).__name__}: {str(e)[:1500] if len(names) < 4 else str(e)[:400]}",
                flush=True,
            )
            if len(names) < 4:
                traceback.print_exc()
            continue
        if nans:
            print(f"  NAN {name}: {nans[:4]}")
        if plain_only:
            print(
                f"plain {name} {time.time() - t0:.1f}s",
                {k: v for k, v in a.items() if k.startswith("history")}
                if len(names) < 4
                else "",
                flush=True,
            )
            continue
        catch.lines.clear()
        t1 = time.time()
        strategy = STRATEGIES[variant]()
        try:
            with warnings.catch_warnings(record=True) as w:
                warnings.simplefilter("always")
                b, tb, model = train(name, strategy, variant)
        except Exception as e:
            print(
                f"RAISES {name}: {type(e).__name__}: {str(e)[:600]}", flush=True
            )
            if len(names) < 4:
                traceback.print_exc()
            continue
        bad, _ = compare(name, a, b)
        ws = sorted(
            {
                str(x.message)[:200]
                for x in w
                if x.category in (UserWarning, RuntimeWarning)
            }
            | {l[:300] for l in catch.lines}
        )
        once = [
            l
            for l in strategy.describe().splitlines()
            if "once" in l and "update" not in l
        ]
        slow = tb > 3 * ta and tb > 1
        print(
            f"{'UNEQUAL' if bad else 'equal'} {name} plain {t1 - t0:.1f}s ({ta:.1f}) towers {time.time() - t1:.1f}s ({tb:.1f}){' SLOW' if slow else ''}",
            flush=True,
        )
        for l in bad[:8]:
            print("    ", l)
        for l in ws:
            print("     warning:", l)
        if os.environ.get("DESCRIBE"):
            print(strategy.describe())
        else:
            for l in once[:4]:
                print("     ", l[:200])
        good += not bad
    print("equal:", good, "of", len(names))


if __name__ == "__main__":
    main()
