"""Training over the workers of a Ray cluster, by Ray Train.

Its ``TowerTrainer`` starts a training loop on Ray's workers, in which
``keras_towers.HorovodStrategy`` finds the others; ``Report`` is its callback.
"""

# Ray is optional.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from keras_towers import compat
from keras_towers.backup.resuming import ResumingCallback, SavedPosition
from keras_towers.errors import CompatibilityError, TowerError
from keras_towers.fit.weights import model_state as state_lib

try:
    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from keras_towers.launching.ray import RanksConfig
except ImportError as _error:
    raise CompatibilityError(
        f"keras_towers.ray needs Ray 2.60 with Ray Train ({_error}). It comes "
        "by an extra: keras-towers[ray]."
    ) from _error

__all__ = ["Report", "TowerTrainer", "WEIGHTS"]

WEIGHTS = "model.weights.h5"
"""The file of a checkpoint that ``model.load_weights`` reads."""

_PLACE = "place.json"
_FACTS = ("epoch", "epochs", "history")


class TowerTrainer(DataParallelTrainer):
    """Runs a training loop on Ray's workers as the ranks of one job.

    Every worker calls the loop, in which ``keras_towers.HorovodStrategy``
    trains over all workers: the weights are those of one process. Ray assigns
    CPUs and GPUs to workers.

    Args:
        train_loop_per_worker: a function of ``train_loop_config``, or of
            nothing. What it returns on rank 0 is ``return_value`` of the
            result.
        stall_warning_s: as for ``kt.launch``.
        stall_shutdown_s: likewise.
        **options: those of Ray's ``DataParallelTrainer``:
            ``train_loop_config``, ``scaling_config``, ``run_config``,
            ``datasets``, ``dataset_config``, ``validation_config``.

    Example:
        >>> trainer = kt_ray.TowerTrainer(
        ...     train, scaling_config=ray.train.ScalingConfig(num_workers=2)
        ... )
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        stall_warning_s: int = 30,
        stall_shutdown_s: int = 1800,
        **options: Any,
    ):
        super().__init__(
            train_loop_per_worker,
            backend_config=RanksConfig(stall_warning_s, stall_shutdown_s),
            **options,
        )


class Report(ResumingCallback):
    """Reports each epoch to Ray, and resumes ``fit`` where Ray's run was.

    Rank 0 saves the weights and the optimizer's state in a checkpoint. Where
    Ray starts the loop again, because a worker was lost or a run of the same
    name continues, ``fit`` begins after the epoch of the last checkpoint:
    weights and ``History`` are those of an undisturbed run. To be used in one
    call of ``fit`` in a run, on every worker.

    Args:
        every: epochs from one checkpoint to the next. The last of ``epochs``
            has one, too.

    Raises:
        TowerError: ``every`` is not positive; ``fit`` runs outside of a
            strategy's block, where it would begin with the first epoch.

    Example:
        >>> model.fit(x, y, epochs=10, callbacks=[kt_ray.Report(every=2)])
        >>> with result.checkpoint.as_directory() as folder:
        ...     model.load_weights(os.path.join(folder, kt_ray.WEIGHTS))
    """

    def __init__(self, every: int = 1):
        if every < 1:
            raise TowerError(f"every={every} epochs: give 1 or more.")
        super().__init__(_Run(every), None)


class _Run(SavedPosition):
    """Position of ``fit`` and state of a model, in checkpoints of Ray Train."""

    refusal = (
        "keras_towers.ray.Report works inside a strategy's block only: put "
        "`with kt.HorovodStrategy():` around fit."
    )

    def __init__(self, every: int):
        super().__init__()
        self._every = every
        self._last = 0
        self._model: keras.Model | None = None

    def read(self) -> None:
        # The same on all ranks, and when Ray starts them again.
        name = ray.train.get_context().get_experiment_name()
        self.restart(compat.global_seed() or zlib.crc32(name.encode()) >> 1)
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                place = json.loads(Path(folder, _PLACE).read_text())
            for fact in _FACTS:
                setattr(self, fact, place[fact])

    def attach(self, model: keras.Model, epochs: int) -> None:
        self._model, self._last = model, epochs
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        with checkpoint.as_directory() as folder:
            model.load_weights(Path(folder, WEIGHTS))
            place = json.loads(Path(folder, _PLACE).read_text())
        seeds = state_lib.collect(model).seeds
        for variable, value in zip(seeds, place["seeds"], strict=True):
            variable.assign(value)

    def commit(self) -> None:
        # All workers wait for one another.
        due = self.epoch % self._every == 0 or self.epoch == self._last
        logs = {name: values[-1] for name, values in self.history.items()}
        checkpoint = None
        with tempfile.TemporaryDirectory() as folder:
            if due and self.writes:
                self._save(Path(folder))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": self.epochs[-1], **logs}, checkpoint)

    def _save(self, folder: Path) -> None:
        assert self._model is not None
        # Keras does not save the states of random generators.
        seeds = state_lib.collect(self._model).seeds
        place = {fact: getattr(self, fact) for fact in _FACTS}
        place["seeds"] = [v.numpy().tolist() for v in seeds]
        (folder / _PLACE).write_text(json.dumps(place, default=float))
        self._model.save_weights(folder / WEIGHTS)
