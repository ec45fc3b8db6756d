"""Steps that run eagerly: as on one device, with a warning."""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets

import keras
import tensorflow as tf

from keras_towers.fit.context import thread_state
from keras_towers.fit.data import batches as data_lib
from keras_towers.fit.data.same_data import Fingerprint
from keras_towers.fit.places import ALONE
from keras_towers.fit.ranks.compared_step import ComparedStep
from keras_towers.fit.ranks.step_agreement import STEP_KEY
from keras_towers.fit.step.graph.step_inputs import (
    as_one_batch,
    gather_batch,
    shares_batches,
)
from keras_towers.fit.step.graph.step_layout import StepSettings
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.copies import copy_on_tower, native
from keras_towers.fit.weights.model_state import collect, eager_cause
from keras_towers.fit.weights.shards import spans_ranks
from keras_towers.foundation import compat
from keras_towers.foundation.notices import first_time, logger
from keras_towers.foundation.object_types import Step, Structure
from keras_towers.jobs.rendezvous import rank_checks


class EagerStep:
    """Runs steps that Keras does not trace, which towers cannot divide.

    Args:
        update: the update of weights, whose variables the steps use.
    """

    def __init__(self, update: WeightUpdate):
        self._update, self._order = update, update.order
        self._numbers = itertools.count()

    def run(
        self, step: Step, batch: Structure, settings: StepSettings
    ) -> Structure:
        """Run a step on the first device, with the global batch.

        Args:
            step: a function of a batch, which one device would call.
            batch: a global batch, or the towers' parts of one.
            settings: what it runs for.
        """
        config, variables = self._update.config, self._update.variables
        model, places = settings.model, settings.places
        if first_time(model, ("runs eagerly", config.name)):
            logger.warning(
                "model %r runs eagerly, so its steps are not divided: they run "
                "as on one device under %s. To train on all towers, leave "
                "out %s.",
                model.name,
                config.name,
                eager_cause(model),
            )
        # Each rank computes the step on the global batch, also where it would
        # train on its own part only: its updates belong to no round.
        transport = config.transport if places.ranks.in_lockstep else ALONE
        is_whole = data_lib.is_whole(batch)
        if is_whole and shares_batches(config, places.ranks):
            data = Fingerprint(batch)
            compared = ComparedStep.of_exchanges((), fingerprint=data)
            self._order.agreement.assert_same(compared, (), STEP_KEY)
        whole = as_one_batch(config, places, batch)
        with contextlib.ExitStack() as stack:
            if transport.size > 1:
                if not is_whole or config.options.batches == "each":
                    whole = gather_batch(whole, transport)
                if self._first_seed is not None:
                    # Between steps, ranks may draw different numbers of values.
                    seed = self._first_seed + next(self._numbers)
                    stack.enter_context(compat.global_seed_of(seed))
            stack.enter_context(compat.single_device_mode())
            one_device = thread_state.trains_on_one_device
            stack.enter_context(one_device.holding(settings.trains))
            stack.enter_context(variables.first_copies())
            result = step(whole)
        if transport.size > 1:
            self._order.check_first_results(lambda: _values_of(result, model))
            self._order.end_eager_step()
        variables.copy_first()
        return result

    @functools.cached_property
    def _first_seed(self) -> int | None:
        """The first seed of eager steps; None if ranks have a common one."""
        local = compat.global_seed(), secrets.randbits(31)
        where = "begins a step that runs eagerly"
        ranks = rank_checks.gather(self._update.config.transport, local, where)
        seeds = [seed for seed, _ in ranks]
        if None not in seeds and len(set(seeds)) == 1:
            return None
        return ranks[0][1] if seeds[0] is None else seeds[0]


def _values_of(result: object, model: keras.Model) -> list[tf.Tensor]:
    """Return the results and the weights that an eager step has computed."""
    weights = [v for v in collect(model).weights if not spans_ranks(v)]
    values = [copy_on_tower(native(weight)).read_value() for weight in weights]
    return data_lib.tensors_in(result) + values
