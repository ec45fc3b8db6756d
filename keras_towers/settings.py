"""Environment variables and time limits of the package.

``docs/settings.md`` is made of this module: a test compares them. Each name's
docstring is its line there.
"""

CACHE = "KERAS_TOWERS_CACHE"
"""Folder of built wheels and their logs. Default: `keras-towers` in the user's
cache folder."""
SEED = "KERAS_TOWERS_SEED"
"""Seed of all processes of a job; `keras-towers run` sets it. Default: not
seeded."""
RANK = "KERAS_TOWERS_RANK"
"""Rank of a process, where [no launcher](clusters.md#anything-else) gives one.
"""
SIZE = "KERAS_TOWERS_SIZE"
"""Number of a job's processes, likewise."""
JOB = "KERAS_TOWERS_JOB"
"""Word that tells a job from others, [where ranks
meet](clusters.md#how-the-ranks-meet)."""
MEETING_FOLDER = "KERAS_TOWERS_MEETING_FOLDER"
"""Folder of the [file by which ranks meet](clusters.md#how-the-ranks-meet),
shared by all machines. Default: the temporary folder on one machine, else
`~/.cache/keras-towers`."""
RENDEZVOUS = "KERAS_TOWERS_RENDEZVOUS"
"""`host:port` of rank 0, [in place of that
file](clusters.md#how-the-ranks-meet)."""
SECRET = "KERAS_TOWERS_SECRET"
"""Secret of a job, of 16 characters or more, [in place of that
file](clusters.md#how-the-ranks-meet); launchers set it."""
STORE = "KERAS_TOWERS_STORE"
"""`host:port` of the store of a job without Horovod; `keras-towers run` sets
it."""
OWN_GPUS = "KERAS_TOWERS_OWN_GPUS"
"""Set by a launcher that shows each rank GPUs of its own, instead of all of the
machine."""
BYTEPS_LAUNCHED = "KERAS_TOWERS_BYTEPS_LAUNCHED"
"""Set by `keras-towers run` for workers of BytePS, which it watches."""
MEETING_TIMEOUT = "KERAS_TOWERS_MEETING_TIMEOUT"
"""Seconds in which all ranks have to [meet](clusters.md#how-the-ranks-meet).
Default: 600."""
START_TIMEOUT = "KERAS_TOWERS_START_TIMEOUT"
"""Seconds in which [processes of BytePS](byteps.md) that nobody launched have
to find one another. Default: 300."""
STALL_WARNING = "HOROVOD_STALL_CHECK_TIME_SECONDS"
"""Seconds until a waiting rank names the ranks that it waits for:
`--stall-warning`. Default: 30."""
STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
"""Seconds until a stalled job is ended: `--stall-shutdown`. Default: never."""
STALL_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
"""1: waiting ranks name nobody: `--stall-warning 0`."""

MEETING_TIMEOUT_S = 600
"""Default of `KERAS_TOWERS_MEETING_TIMEOUT`."""
START_TIMEOUT_S = 300
"""Default of `KERAS_TOWERS_START_TIMEOUT`."""
STALL_WARNING_S = 30.0
"""Default of `HOROVOD_STALL_CHECK_TIME_SECONDS`; BytePS's start is told of as
often."""
STALL_BEAT_S = 5.0
"""Longest time between two signs of life of a rank in the store."""
NOTICE_S = 5.0
"""Until a process tells for the first time whom it waits for at the start."""
POLL_S = 0.05
"""Between two looks at processes and files of this machine, or at a key of the
store."""
FIRST_PAUSE_S = 0.001
"""First pause between two looks at a key of the store; it grows to `POLL_S`."""
NETWORK_POLL_S = 0.1
"""Between two attempts to reach a process that has not started."""
LOOK_S = 2.0
"""Between two looks at whether a process that is waited for is alive."""
BEAT_S = 2.0
"""Between two signs of life of a task on TensorFlow's runtime."""
GONE_S = 10.0
"""Without a sign of life for so long, a worker of parameter servers is gone."""
CHIEF_GONE_S = 30.0
"""Without a sign of life of the chief for so long, a parameter server ends."""
SERVER_LOOK_S = 0.5
"""Between two looks of a parameter server at its workers."""
ANSWER_S = 30.0
"""Longest answer of a parameter server to a question that needs no waiting."""
TASK_ANSWER_S = 2.0
"""Longest answer of a task to the question whether it is alive."""
CANCEL_S = 5.0
"""For an operation on a parameter server to end that was cancelled."""
DYING_S = 0.5
"""For a process that dies to close all of its sockets."""
ABANDON_S = 10.0
"""For the coordinator of a round of replicas to notice that `fit` has failed.
"""
REQUEST_S = 3
"""For the rest of a request to the store to arrive."""
INTACT_MARGIN_S = 5.0
"""Beyond Horovod's own time limits, for ranks to find out whether one is lost.
"""
SSH_CONNECT_S = 10
"""For ssh to connect to a host."""
DISCOVERY_S = 20
"""For the host discovery script of an elastic job to end."""
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL for the ranks of a job that ends."""
LAST_WORDS_S = 1.0
"""For other ranks to tell what they know when one has failed."""
CULPRIT_S = 10.0
"""For the rank that caused a failure to end, where all failures are
consequences."""
SERVERS_S = 5.0
"""For processes that served the ranks to notice that all have ended."""
REDRAW_S = 2.0
"""Between two states of a rank's progress bar in a shared terminal."""
TRACES_S = 10.0
"""From which on the traces of all towers, one after another, are announced."""
SAVE_WAIT_S = 10.0
"""For other ranks to come to a save that rank 0 writes [once for
all](clusters.md)."""
SAVE_OWN_S = 1.0
"""For rank 0 to begin with a save, until a rank takes it for its own."""
BUILD_S = 2 * 3600
"""For the build of an engine, which takes minutes."""
