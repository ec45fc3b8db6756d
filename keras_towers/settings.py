"""Environment variables, which ``docs/errors.md`` lists, and time limits.

The comment above a variable is its line on the page. A script may change a
limit before it trains; those that end in ``_S`` are seconds.
"""

#: Folder of built wheels and their logs. Default: `keras-towers` in the user's
#: cache folder.
CACHE = "KERAS_TOWERS_CACHE"
#: Seed of all processes of a job; `keras-towers run` sets it. Default: not
#: seeded.
SEED = "KERAS_TOWERS_SEED"
#: Rank of a process, where no launcher gives one.
RANK = "KERAS_TOWERS_RANK"
#: Number of a job's processes, likewise.
SIZE = "KERAS_TOWERS_SIZE"
#: Word that tells a job from others, where ranks meet.
JOB = "KERAS_TOWERS_JOB"
#: Folder of the file by which ranks meet, shared by all machines. Default: the
#: temporary folder on one machine, else `~/.cache/keras-towers`.
RENDEZVOUS_FOLDER = "KERAS_TOWERS_RENDEZVOUS_FOLDER"
#: `host:port` of rank 0, in place of that file.
RENDEZVOUS = "KERAS_TOWERS_RENDEZVOUS"
#: Secret of a job, of 16 characters or more, in place of that file; launchers
#: set it.
SECRET = "KERAS_TOWERS_SECRET"
#: `host:port` of the store of a job; launchers set it.
STORE = "KERAS_TOWERS_STORE"
#: Set by a launcher that shows each rank GPUs of its own, instead of all of the
#: machine.
OWN_GPUS = "KERAS_TOWERS_OWN_GPUS"
#: Set by `keras-towers run` for workers of BytePS, which it watches.
BYTEPS_LAUNCHED = "KERAS_TOWERS_BYTEPS_LAUNCHED"
#: Seconds in which all ranks have to meet. Default: 600.
RENDEZVOUS_TIMEOUT = "KERAS_TOWERS_RENDEZVOUS_TIMEOUT"
#: Seconds in which processes of BytePS that nobody launched have to find one
#: another. Default: 300.
START_TIMEOUT = "KERAS_TOWERS_START_TIMEOUT"
#: Seconds until a waiting rank names the ranks that it waits for:
#: `--stall-warning`. Default: 30.
STALL_WARNING = "HOROVOD_STALL_CHECK_TIME_SECONDS"
#: Seconds until a stalled job is ended: `--stall-shutdown`. Default: never;
#: 1800 under `keras-towers run`.
STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
#: 1: waiting ranks name nobody: `--stall-warning 0`.
STALL_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"

#: Default of `KERAS_TOWERS_RENDEZVOUS_TIMEOUT`.
RENDEZVOUS_TIMEOUT_S = 600
#: Default of `KERAS_TOWERS_START_TIMEOUT`.
START_TIMEOUT_S = 300
#: Default of `HOROVOD_STALL_CHECK_TIME_SECONDS`.
STALL_WARNING_S = 30
#: Default of `--stall-shutdown`.
STALL_SHUTDOWN_S = 1800
#: Default of `--grace`: for scripts to end after SIGTERM.
SCRIPT_GRACE_S = 30
#: Default of `--elastic-timeout`.
ELASTIC_TIMEOUT_S = 600
#: Longest time between two signs of life of a rank in the store.
STALL_BEAT_S = 5.0
#: Without a sign of life for so long, a host or a process is lost.
LOST_S = 40.0
#: Until a process tells for the first time whom it waits for at the start.
NOTICE_S = 5.0
#: Between two looks at processes and files of this machine, or at a key of the
#: store.
POLL_S = 0.05
#: First pause between two looks at a key of the store; it grows to `POLL_S`.
FIRST_PAUSE_S = 0.001
#: Between two attempts to reach a process that has not started.
NETWORK_POLL_S = 0.1
#: Between two looks at whether a process that is waited for is alive.
LOOK_S = 2.0
#: Between two signs of life of a task on TensorFlow's runtime.
BEAT_S = 2.0
#: Without a sign of life of the chief for so long, a parameter server ends:
#: later than the workers, which know more.
CHIEF_LOST_S = 45.0
#: Between two looks of a parameter server at its workers.
SERVER_LOOK_S = 0.5
#: Longest answer of a parameter server to a question that needs no waiting.
ANSWER_S = 40.0
#: Longest answer of a task to the question whether it is alive.
TASK_ANSWER_S = 2.0
#: For an operation on a parameter server to end that was cancelled.
CANCEL_S = 5.0
#: For a process that dies to close all of its sockets.
DYING_S = 0.5
#: For a process to end that has lost another one, from the end of its script.
TEARDOWN_S = 10.0
#: For the coordinator of a round of replicas to notice that `fit` has failed.
ABANDON_S = 10.0
#: Longest answer of the store to a question that needs no waiting.
STORE_ANSWER_S = 5.0
#: For a value to come that is not yet in the store, until a rank asks again.
HOLD_S = 4.0
#: For the rest of a request to the store to arrive.
REQUEST_S = 3
#: Beyond Horovod's own time limits, for ranks to find out whether one is lost.
INTACT_MARGIN_S = 5.0
#: For ssh to connect to a host.
SSH_CONNECT_S = 10
#: Connections by ssh to a host that are logging in, at most: by default its
#: server refuses more than 10.
LOGINS = 8
#: For the host discovery script of an elastic job to end.
DISCOVERY_S = 20
#: Between two runs of that script.
DISCOVERY_PAUSE_S = 1.0
#: Between SIGTERM and SIGKILL for the ranks of a job that ends.
GRACE_S = 3.0
#: For other ranks to tell what they know when one has failed.
LAST_WORDS_S = 1.0
#: For the rank that caused a failure to end, where all failures are
#: consequences.
CULPRIT_S = 10.0
#: For processes that served the ranks to notice that all have ended.
SERVERS_S = 5.0
#: Between two states of a rank's progress bar in a shared terminal.
REDRAW_S = 2.0
#: For other ranks to come to a save that rank 0 writes once for all.
SAVE_WAIT_S = 10.0
#: For rank 0 to begin with a save, until a rank takes it for its own.
SAVE_OWN_S = 1.0
#: Ranks that a message names, at most.
NAMED = 8
#: Ranks after its own, at most, that a rank looks at while it waits.
LOOKED_AT = 32
#: For the build of an engine, which takes minutes.
BUILD_S = 2 * 3600
#: For a compiler to say which it is.
TOOL_S = 60
#: For a process of its own to import TensorFlow or an engine.
IMPORT_S = 120
#: Between SIGTERM and SIGKILL for a command that is not a job's.
COMMAND_GRACE_S = 10
#: Bytes, at least, of the parts of large weights that parameter servers update
#: one after another.
PART_BYTES = 2_000_000
