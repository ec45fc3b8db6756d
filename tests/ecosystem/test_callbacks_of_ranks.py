"""Callbacks of MLflow, W&B, TensorBoard and Orbax over two ranks."""

import importlib.util

import pytest

from keras_towers.foundation import compat
from tests.kit.ranks import Job, each_check_of, names

pytestmark = pytest.mark.slow
WORKER = "tests.ecosystem.callbacks_of_ranks"
WANTED = [
    name
    for name in names(WORKER)
    if importlib.util.find_spec(name.partition("_")[0]) is not None
    # Keras's callback for it is younger.
    if not name.startswith("orbax") or compat.KERAS >= (3, 14)
]
# TensorBoard is there for other tests, too.
if not any(name.startswith(("mlflow", "wandb", "orbax")) for name in WANTED):
    reason = "none of them is installed: make test-ecosystem"
    pytest.skip(reason, allow_module_level=True)
JOBS = {
    "TensorFlow": Job(
        WORKER,
        WANTED,
        number="--workers",
        TESTED_STRATEGY="MultiWorkerTowerStrategy",
    )
}
test_callbacks = each_check_of(JOBS)
