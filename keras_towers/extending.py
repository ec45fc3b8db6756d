"""Parts of your own, such as operations, hooks, transports and strategies.

=====================  ========================================================
``Reduction``          a function that sums gradients of a process's towers
``OnDevice``           a reduction that sums on one device, such as the CPU
``CommunicationHook``  a function that sums gradients of processes
``StatefulHook``       a hook that keeps a state from one step to the next
``PowerSGD``           a hook that sends low-rank factors of matrices
``EngineTransport``    the base class of transports, which connect processes
``join_job``           gives a transport the rank of its process
``Transport``          the collectives that a hook can use
``Placement``          a function that chooses the device of a weight
``ComposedStrategy``   a strategy of such parts, and a base class for yours
``add_operation``      says how towers divide an operation of your own
``elementwise``        the axes of an operation on single entries
``Factors``            the axes of any other operation
``ClusterEnvironment`` describes a launcher, and the ranks that it starts
``check_strategy``     trains small models on a strategy and on one device
``CASES``              the names of these trainings
=====================  ========================================================

All of these are public. Other modules of the package are not, unless the API
reference lists them.
"""

from __future__ import annotations

from keras_towers.fit.weights.least_loaded import (
    LeastLoadedPlacement as LeastLoadedPlacement,
    Placement as Placement,
)
from keras_towers.inspection.conformance import cases
from keras_towers.inspection.conformance.strategy_check import (
    check_strategy as check_strategy,
)
from keras_towers.jobs.rendezvous.joined_job import (
    JoinedJob as JoinedJob,
    join_job as join_job,
)
from keras_towers.jobs.rendezvous.launchers import (
    ClusterEnvironment as ClusterEnvironment,
)
from keras_towers.partition.ir.registry import (
    Factors as Factors,
    add_operation as add_operation,
    elementwise as elementwise,
)
from keras_towers.reduction.collectives import (
    OnDevice as OnDevice,
    Reduction as Reduction,
)
from keras_towers.reduction.compression_hooks import (
    CommunicationHook as CommunicationHook,
)
from keras_towers.reduction.gradients import (
    Gradient as Gradient,
    Gradients as Gradients,
    on_values as on_values,
)
from keras_towers.reduction.stateful_hooks import (
    HookState as HookState,
    PowerSGD as PowerSGD,
    StatefulHook as StatefulHook,
)
from keras_towers.strategies.composed import (
    ComposedStrategy as ComposedStrategy,
)
from keras_towers.transport import Transport as Transport
from keras_towers.transport.engine_transport import (
    EngineTransport as EngineTransport,
)

CASES: tuple[str, ...] = tuple(cases.CASES)
"""The names of the cases of ``check_strategy``."""
