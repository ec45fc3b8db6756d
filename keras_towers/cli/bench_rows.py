"""The rows of the benchmark of several processes, by name."""

from __future__ import annotations

# The names that HorovodStrategy's ``compression`` takes. A list of its own,
# because the module that knows them takes TensorFlow to import.
COMPRESSIONS = (
    "none",
    "fp16",
    "fp16-shards",
    "bf16",
    "fp16-feedback",
    "bf16-feedback",
)
COMPUTE = "compute"
RAW = "horovod-raw"
DROP_IN = "horovod-drop-in"
STRATEGY = "strategy"
STOCK = "stock-loop"
TORCH_COMPUTE = "torch-compute"
TORCH = "torch-ddp"

OUR_ROWS = (
    DROP_IN,
    STRATEGY,
    *(f"{STRATEGY}-{name}" for name in COMPRESSIONS),
)
TORCH_ROWS = (TORCH_COMPUTE, TORCH)
# Nothing is exchanged: what the others cost is counted from here.
COMPUTE_ROWS = (COMPUTE, TORCH_COMPUTE)
ROWS = (COMPUTE, RAW, *OUR_ROWS, STOCK, *TORCH_ROWS)

NOTES = {
    COMPUTE: "plain Keras, every process for itself, all at the same time",
    RAW: "hvd.grouped_allreduce in the optimizer's apply, by hand",
    DROP_IN: "keras_towers.horovod.DistributedOptimizer",
    STRATEGY: "HorovodStrategy(); strategy-NAME: with compression=NAME",
    STOCK: "MultiWorkerMirroredStrategy's ring in the training loop of "
    "TensorFlow's guide, without fit, which crashes under it on Keras 3",
    TORCH: "DistributedDataParallel on gloo in a loop; its cost is counted "
    "from torch-compute, the same loop in every process for itself",
}


def compute_row(row: str) -> str:
    """Name the row that ``row`` is compared with to see what exchange costs."""
    return TORCH_COMPUTE if row in TORCH_ROWS else COMPUTE
