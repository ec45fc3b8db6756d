"""Environment variables, which ``docs/errors.md`` lists, and time limits.

Names of variables begin with ``ENV_``; the comment above one is its line on the
page, unless it begins with "Set by". A script may change a limit before it
trains. Names that end in ``_S`` are in seconds.
"""

#: Folder for built wheels and their logs. Default: `keras-towers` in the user's
#: cache folder.
ENV_CACHE = "KERAS_TOWERS_CACHE"
#: As `--device-memory`, such as 24GiB. 0: no check. Default: the memory of
#: GPUs.
ENV_DEVICE_MEMORY = "KERAS_TOWERS_DEVICE_MEMORY"
#: Seed for all processes of a job. `keras-towers run` sets it. Default: no
#: seed.
ENV_SEED = "KERAS_TOWERS_SEED"
#: Rank of a process, if no launcher sets it.
ENV_RANK = "KERAS_TOWERS_RANK"
#: Number of processes of the job, if no launcher sets it.
ENV_SIZE = "KERAS_TOWERS_SIZE"
#: Any word that identifies the job, so that its ranks can meet.
ENV_JOB = "KERAS_TOWERS_JOB"
#: Folder for the file through which ranks meet, on all machines. Default: the
#: temporary folder if the job has one machine, else the user's cache folder.
ENV_RENDEZVOUS_FOLDER = "KERAS_TOWERS_RENDEZVOUS_FOLDER"
#: `host:port` of rank 0, instead of that file.
ENV_RENDEZVOUS = "KERAS_TOWERS_RENDEZVOUS"
#: Secret of the job (16 characters or more), instead of that file.
#: `keras-towers run` sets it.
ENV_SECRET = "KERAS_TOWERS_SECRET"
#: Set by a rank when it connects, for processes that it starts, which are no
#: ranks: its process ID and its place.
ENV_PLACE = "KERAS_TOWERS_PLACE"
#: Set by launchers: `host:port` of the job's store.
ENV_STORE = "KERAS_TOWERS_STORE"
#: Set by launchers: ranks become tasks of TensorFlow, which they find by the
#: store.
ENV_TASKS = "KERAS_TOWERS_TASKS"
#: Set by launchers: folder of the commits of a job that may start again.
ENV_COMMITS = "KERAS_TOWERS_COMMITS"
#: Set by launchers: key of the store for which a standby process waits.
ENV_STANDBY = "KERAS_TOWERS_STANDBY"
#: 1: your launcher shows each process only its own GPUs.
ENV_OWN_GPUS = "KERAS_TOWERS_OWN_GPUS"
#: Set by launchers: a worker of BytePS is supervised.
ENV_BYTEPS_LAUNCHED = "KERAS_TOWERS_BYTEPS_LAUNCHED"
#: Seconds to wait for other ranks, parameter servers and the chief to start.
#: `MultiWorkerTowerStrategy` has `start_timeout_s` instead. Default: 600.
ENV_RENDEZVOUS_TIMEOUT = "KERAS_TOWERS_RENDEZVOUS_TIMEOUT"
#: With BytePS, seconds to wait for processes that you start by hand.
#: Default: 300.
ENV_START_TIMEOUT = "KERAS_TOWERS_START_TIMEOUT"
#: Seconds to wait for a small sum over NCCL; then strategies do without NCCL.
#: 0: they never use it. Default: 60.
ENV_NCCL_TIMEOUT = "KERAS_TOWERS_NCCL_TIMEOUT"
#: As `--stall-warning`, in seconds. Default: 30.
ENV_STALL_WARNING = "HOROVOD_STALL_CHECK_TIME_SECONDS"
#: As `--stall-shutdown`, in seconds. 0: never. Default: 1800. Tasks that you
#: start with `TF_CONFIG` ignore it.
ENV_STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
#: 1: as `--stall-warning 0`. A stalled job still ends.
ENV_STALL_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"

#: Default of `KERAS_TOWERS_RENDEZVOUS_TIMEOUT`.
RENDEZVOUS_TIMEOUT_S = 600
#: Default of `KERAS_TOWERS_START_TIMEOUT`.
START_TIMEOUT_S = 300
#: Default of `KERAS_TOWERS_NCCL_TIMEOUT`.
NCCL_TIMEOUT_S = 60
#: Default of `HOROVOD_STALL_CHECK_TIME_SECONDS`.
STALL_WARNING_S = 30
#: Default of `--stall-shutdown`.
STALL_SHUTDOWN_S = 1800
#: Default of `stall_timeout_s`: for slow or restarting workers of a strategy.
STALL_TIMEOUT_S = 600
#: Default of `--grace`: for scripts to end after SIGTERM.
SCRIPT_GRACE_S = 30
#: Default of `--elastic-timeout`.
ELASTIC_TIMEOUT_S = 600
#: Default of `--blacklist-cooldown-range`.
ELASTIC_COOLDOWN_S = 5, 600
#: Longest time between two reports of a rank to the store.
STALL_BEAT_S = 5.0
#: A host or process is lost if it gives no sign of life for so long.
LOST_S = 40.0
#: A rank that a signal has stopped is killed, and lost, after so long: before
#: the others give it up.
FROZEN_S = 30.0
#: Until a process first reports which processes it waits for at the start.
NOTICE_S = 5.0
#: Pause between two polls of processes and files of this machine, or of a key
#: of the store.
POLL_S = 0.05
#: How long the kernel keeps a connection to the store on which nothing comes.
SILENT_S = 1
#: First pause between two polls of a key of the store; it grows to `POLL_S`.
FIRST_PAUSE_S = 0.001
#: Pause between two attempts to reach a process that has not started.
NETWORK_POLL_S = 0.1
#: Pause between two checks whether a process that is waited for is alive.
LIVENESS_CHECK_S = 2.0
#: Pause between two looks at which processes are gone, two heartbeats of
#: parameter servers and agents, and two polls of a task on TensorFlow's
#: runtime.
BEAT_S = 2.0
#: Pause between two heartbeats of a rank that another launcher has started.
HEARTBEAT_S = 5.0
#: With many ranks that is longer, so that no more heartbeats come in a second.
HEARTBEATS_PER_S = 100
#: A parameter server ends if the chief gives no sign of life for so long: later
#: than the workers, which report the reason.
CHIEF_LOST_S = 45.0
#: Pause between two checks of the workers by a parameter server.
SERVER_LOOK_S = 0.5
#: Longest answer of a parameter server to a request that needs no waiting.
ANSWER_S = 40.0
#: Longest answer of a task that is polled.
TASK_ANSWER_S = 2.0
#: Time for a cancelled operation on a parameter server, or a collective, to
#: end.
CANCEL_S = 5.0
#: Time for a dying process to close all of its sockets.
SOCKET_CLOSE_S = 0.5
#: Time for a process that has lost another one to end after its script.
TEARDOWN_S = 10.0
#: Time for the coordinator of a round of replicas to notice that `fit` has
#: failed.
ABANDON_S = 10.0
#: Longest answer of the store to a request that needs no waiting.
STORE_ANSWER_S = 5.0
#: Time for the store to hold a request of a rank that meets others for a
#: missing value, until the rank asks again.
HOLD_S = 4.0
#: The same, of a rank that listens for what may never be written.
LISTEN_S = 30.0
#: Time for the rest of a request to the store to arrive.
REQUEST_S = 10.0
#: Time for ssh to connect to a host.
SSH_CONNECT_S = 10
#: Largest number of simultaneous ssh logins on a host: by default its server
#: refuses more than 10.
LOGINS = 8
#: Time for the other ranks to leave a call that has failed on one of them,
#: until the error is raised.
FAILED_CALL_S = 10.0
#: After so many rounds without a backup, a job without a limit ends.
IDLE_ROUNDS = 3
#: Time for the host discovery script of an elastic job to end.
DISCOVERY_S = 20
#: Pause between two runs of that script.
DISCOVERY_PAUSE_S = 1.0
#: Time between SIGTERM and SIGKILL for the ranks of a job that ends.
GRACE_S = 3.0
#: Time for other ranks to report what they know when one has failed.
FAILURE_REPORT_S = 1.0
#: Time for a rank that has left its job to end, until another rank reports
#: that.
LEFT_S = 30.0
#: Time for the rank that caused a failure to end, if all failures so far are
#: consequences of it.
CAUSE_WAIT_S = 10.0
#: Time for parameter servers to notice that all ranks have ended.
SERVERS_S = 5.0
#: Pause between two states of a rank's progress bar in a shared terminal.
REDRAW_S = 2.0
#: A traceback is held back for so long, to show that of several ranks once.
MAX_TRACEBACK_S = 2.0
#: A traceback has ended if its rank then prints nothing for so long.
TRACEBACK_S = 0.3
#: Ranks that fail within this time show once what their tracebacks have in
#: common.
SAME_FAILURE_S = 60.0
#: Time for a file that rank 0 has made to appear on another rank.
SEES_FILE_S = 5.0
#: Largest number of slots of a host: more are taken for a mistake.
MAX_SLOTS = 10_000
#: Largest number of ranks that a message names.
MAX_RANKS_NAMED = 8
#: Largest number of other ranks at which a rank looks.
MAX_RANKS_CHECKED = 16
#: Time for the build of an engine, which takes minutes.
BUILD_S = 2 * 3600
#: Time for a compiler to print its version.
TOOL_S = 60
#: Time for each strategy in the self-test of `keras-towers doctor`.
SELF_TEST_S = 180
#: Time for a separate process to import TensorFlow or an engine.
IMPORT_S = 120
#: Time between SIGTERM and SIGKILL for a command outside of jobs.
COMMAND_GRACE_S = 10
#: Smallest size, in bytes, of the chunks in which parameter servers update the
#: weights.
CHUNK_BYTES = 2_000_000
