"""Keys of collectives, and where they are computed."""

import hashlib
import itertools
from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.engines.runtime import collective_transport, tensorflow_task
from keras_towers.engines.runtime.collective_transport import (
    CollectiveTransport,
    instance_key,
)
from keras_towers.foundation.errors import FAILED_ON
from keras_towers.jobs.rendezvous import tf_config

pytestmark = pytest.mark.core


def test_keys_depend_on_the_name_only():
    names = [("kt.sum.1", "float32"), ("kt.sum.2", "float32"), ("kt.sum.1", 8)]
    numbers = [instance_key(*name) for name in names]
    assert numbers == [instance_key(*name) for name in names]
    assert len(set(numbers)) == 3
    assert all(0 <= number < 2**31 for number in numbers)


def test_two_collectives_with_one_number_are_refused(monkeypatch):
    same = SimpleNamespace(digest=lambda: b"same")
    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **kwargs: same)
    monkeypatch.setattr(collective_transport, "_names", {})
    assert instance_key("a") == instance_key("a")
    with pytest.raises(TowerError, match="'a' and 'b' have the same number"):
        instance_key("b")


MESSAGE = """Graph execution error:

Collective ops is aborted by: {}
The error could be from a previous operation. Restart your program to reset.
\t [[{{{{node CollectiveGatherV2}}}}]]"""
OF_RANK_1 = """{}
Additional GRPC error information from remote target \
/job:worker/replica:0/task:1 while calling /tensorflow.WorkerService/RecvBuf:
:UNKNOWN:Error received from peer {{grpc_message:"{}"}}"""


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            OF_RANK_1.format("recvmsg:Connection reset by peer", "recvmsg"),
            tf.errors.UnavailableError,
            "the exchange with rank 1 (b:4000) failed: recvmsg:Connection "
            "reset by peer",
        ),
        (
            # Of a rank that has ended its collectives.
            OF_RANK_1.format(
                f"Collective ops is aborted by: the call has ended, {FAILED_ON}"
                " rank 1: Boom: my bug",
                "Collective ops is aborted by: the call has ended",
            ),
            TowerError,
            f"the call has ended, {FAILED_ON} rank 1: Boom: my bug",
        ),
        (
            "rank 1 (b:4000) gives no sign of life",
            tf.errors.UnavailableError,
            "rank 1 (b:4000) gives no sign of life",
        ),
    ],
)
def test_the_cause_of_an_error_of_collectives(text, kind, said):
    cluster = tf_config.Cluster(
        {"worker": ("a:4000", "b:4000")}, role="worker", index=0
    )
    transport = CollectiveTransport(tensorflow_task.Task(cluster))
    message = MESSAGE.format(text)
    error = tf.errors.UnavailableError(None, None, message)
    found = transport.cause_of(error)
    assert type(found) is kind and str(found) == said
    other = tf.errors.UnavailableError(None, None, "another")
    assert transport.cause_of(other) is other


def test_what_leaves_from_the_host_is_computed_there():
    """TensorFlow may make operations of a GPU's that no GPU has."""
    host, gpu = "/job:localhost/replica:0/task:0/device:CPU:0", "/device:GPU:0"
    cluster = SimpleNamespace(rank=0, size=2, local_rank=0, local_size=1)
    transport = CollectiveTransport(SimpleNamespace(host=host, cluster=cluster))
    transport.sum_on(gpu)
    rows = tf.TensorSpec([4, 3], tf.bfloat16)
    numbers = tf.TensorSpec([5], tf.int64)

    @tf.function(input_signature=[rows, numbers], autograph=False)
    def send(rows, numbers):
        with tf.device(gpu):
            return (
                transport.all_gather(rows, "any"),
                transport.all_gather(numbers, "known", [5, 2]),
                transport.all_to_all(rows, "swap"),
                transport.all_reduce([numbers], "sum"),
            )

    graph = send.get_concrete_function().graph.as_graph_def()
    inner = (f.node_def for f in graph.library.function)
    nodes = [*graph.node, *itertools.chain(*inner)]
    assert sum(node.op.startswith("Collective") for node in nodes) == 5
    on_host = host, "/device:CPU:0"
    elsewhere = {node.op for node in nodes if node.device not in on_host}
    assert elsewhere <= {"Placeholder", "EnsureShape", "Identity", "NoOp"}


def test_ranks_add_up_in_pieces_that_take_turns():
    """Whatever is added up, two pieces of it are in memory."""
    cluster = SimpleNamespace(rank=1, size=2, local_rank=0, local_size=1)
    task = SimpleNamespace(host="/device:CPU:0", cluster=cluster)
    transport = CollectiveTransport(task)

    @tf.function
    def send():
        # 12 MiB, and one row more on rank 0.
        tensor = tf.ones([3 * 1024 + 1, 1024])
        counts = [1537, 1536]
        return (
            transport.reduce_scatter(tensor, counts, "large"),
            transport.reduce_scatter(tf.ones([2, 8]), [1, 1], "small"),
        )

    graph = send.get_concrete_function().graph
    result, few = graph.structured_outputs
    assert (result.shape, few.shape) == ((1536, 1024), (1, 8))
    sent = [o for o in graph.get_operations() if "AllToAll" in o.type]
    most = collective_transport._PIECE_BYTES
    sizes = [o.inputs[0].shape.num_elements() * 4 for o in sent]
    assert max(sizes) <= most
    assert (len(sizes), sum(sizes)) == (5, 2 * 1537 * 4096 + 64)

    def behind(operation):
        """All that an operation needs, at any distance."""
        found, waiting = set(), [operation]
        while waiting:
            one = waiting.pop()
            before = {t.op for t in one.inputs} | {*one.control_inputs}
            waiting += before - found
            found |= before
        return found

    for index, operation in enumerate(sent):
        earlier = [k for k in range(index) if sent[k] in behind(operation)]
        assert earlier == [*range(index % 2, index, 2)]
