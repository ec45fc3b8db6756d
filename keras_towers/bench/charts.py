"""Charts of what the benchmark measured; this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras_towers.bench.report import describe_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a bar may belong to: its colour, and what the legend says.
KINDS = {
    "default": ("#1f6feb", "keras_towers, default strategy"),
    "ours": ("#8db8f7", "keras_towers, others"),
    "tensorflow": ("#d9822b", "TensorFlow"),
    "horovod": ("#8a5a44", "Horovod"),
    "pytorch": ("#8e6bb0", "PyTorch"),
    "jax": ("#2a9d8f", "JAX"),
    "plain": ("#9aa0a6", "plain Keras, one device"),
}
TITLES = {
    "plain": "plain Keras",
    "stock-default": "MirroredStrategy",
    "stock-one-device": "MirroredStrategy, one device",
    "stock-hierarchical": "MirroredStrategy, hierarchical",
    "towers": "TowerStrategy",
    "parameter-server": "ParameterServerTowerStrategy",
    "async": "AsyncTowerStrategy, whole batches",
    "horovod-raw": "Horovod, grouped_allreduce by hand",
    "horovod-drop-in": "keras_towers.horovod",
    "strategy": "HorovodStrategy",
    "strategy-none": "HorovodStrategy, exact by Horovod",
    "sharded": "HorovodStrategy, update in shares",
    "multi-worker": "MultiWorkerTowerStrategy",
    "multi-worker-ring": "MultiWorkerTowerStrategy, ring",
    "byteps": "BytePSStrategy",
    "sync-replicas-1ps": "SyncReplicasStrategy, 1 ps",
    "sync-replicas-2ps": "SyncReplicasStrategy, 2 ps",
    "distributed-parameter-server-1ps": "DistributedParameterServer, 1 ps",
    "distributed-parameter-server-2ps": "DistributedParameterServer, 2 ps",
    "stock-loop": "MultiWorkerMirroredStrategy, own loop",
    "torch-ddp": "PyTorch DDP, gloo (above PyTorch alone)",
}
# Of the field, where they have other names or are other rows.
FIELD_TITLES = {
    **TITLES,
    "keras-tensorflow": "Keras on TensorFlow, one device",
    "keras-torch": "Keras on PyTorch, one device",
    "keras-jax": "Keras on JAX, one device",
    "jax-data-parallel": "Keras on JAX, DataParallel",
    "torch-ddp": "Keras on PyTorch, DDP",
    "horovod-strategy": "HorovodStrategy",
}
# A row's median, smallest and largest value.
Panel = dict[str, dict[str, float]]


def title(row: str) -> str:
    """What a row is called; rows that are not listed are variants."""
    if row in TITLES:
        return TITLES[row]
    name, _, variant = row.partition("-")
    return f"{TITLES[name]}, {variant}"


def kind(row: str) -> str:
    """Which of ``KINDS`` a row belongs to."""
    if row in ("towers", "strategy"):
        return "default"
    theirs = {"stock": "tensorflow", "torch": "pytorch", "plain": "plain"}
    theirs |= {"jax": "jax", "keras": "plain"}
    if row == "horovod-raw":
        return "horovod"
    return theirs.get(row.partition("-")[0], "ours")


def draw_panel(axes: Any, panel: Panel, rows: Sequence[str]) -> None:
    """Draw a bar for each row, its range, and its value behind both."""
    for place, row in enumerate(rows):
        if row not in panel:
            continue
        low, median, high = (panel[row][k] for k in ("low", "median", "high"))
        axes.barh(place, median, color=KINDS[kind(row)][0], height=0.72)
        axes.plot([low, high], [place, place], color="#444444", lw=0.9)
        axes.annotate(
            f"{median:.2f}" if median < 10 else f"{median:.1f}",
            (max(high, median), place),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            weight="bold" if kind(row) == "default" else "normal",
        )
    _bare(axes)


def _bare(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)


def label_rows(
    axes: Any, rows: Sequence[str], named: Callable[[str], str] = title
) -> None:
    """Name the rows, with our default in bold, the first on top."""
    axes.set_yticks(range(len(rows)), [named(row) for row in rows], fontsize=8)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_weight("bold" if kind(row) == "default" else "normal")
    axes.set_ylim(len(rows) - 0.5, -0.5)


def legend(figure: Any, rows: Sequence[str], columns: int) -> None:
    """Explain the colours of the rows above a figure."""
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(color=colour, label=said)
            for which, (colour, said) in KINDS.items()
            if which in map(kind, rows)
        ],
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )


# Columns of the field's chart: the figure, its factor, and what it is.
_FIELD = (
    ("examples_per_s", 1, "examples per second"),
    ("efficiency", 100, "efficiency, %"),
    ("first_step_s", 1, "first step, s"),
    ("step_ms", 1, "step, ms: compute (dark) and rest"),
)


def draw_field(document: dict[str, Any]) -> Figure:
    """Draw throughput, efficiency, first step and the parts of a step.

    Args:
        document: what ``keras-towers bench --field --json`` writes.
    """
    from matplotlib.figure import Figure

    panels: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for result in document["field"]:
        key = result["model"], result["devices"]
        panels.setdefault(key, {})[result["row"]] = result
    heights = [0.9 + 0.24 * len(panel) for panel in panels.values()]
    figure = Figure(figsize=(12.5, 1.2 + sum(heights)), layout="constrained")
    grid = figure.subplots(
        len(panels),
        len(_FIELD),
        squeeze=False,
        height_ratios=heights,
    )
    for across, ((model, devices), results) in zip(
        grid, panels.items(), strict=True
    ):
        for axes, (name, factor, said) in zip(across, _FIELD, strict=True):
            axes.set_title(said, fontsize=9)
            _draw_column(axes, results, name, factor)
        noun = "device" if devices == 1 else "devices"
        across[0].set_title(
            f"{model}, {devices} {noun}: {_FIELD[0][2]}", fontsize=9
        )
    rows = [result["row"] for result in document["field"]]
    settings = document["settings"]
    repeats = settings["repeats"]
    often = (
        f"median of {repeats} runs" if repeats > 1 else "one run of each row"
    )
    figure.supxlabel(
        f"{describe_machine(document['machine'])}\nglobal batch "
        f"{settings['batch_size']}; {often}",
        fontsize=8,
    )
    legend(figure, rows, 3)
    return figure


def _draw_column(
    axes: Any, results: dict[str, dict[str, Any]], name: str, factor: float
) -> None:
    """Draw one figure of all rows, of which only those that count have any."""
    rows = list(results)
    panel = {
        row: {key: factor * value for key, value in result[name].items()}
        for row, result in results.items()
        if result[name]
    }
    if not panel and name != _FIELD[0][0]:
        axes.set_visible(False)
        return
    draw_panel(axes, panel, rows)
    if name == "step_ms":
        for place, (row, result) in enumerate(results.items()):
            if row in panel and result["compute_ms"]:
                compute = result["compute_ms"]["median"]
                width = min(compute, panel[row]["median"])
                axes.barh(
                    place, width, color="#000000", alpha=0.35, height=0.72
                )
    for place, result in enumerate(results.values()):
        if name == "examples_per_s" and not result["counts"]:
            why = "failed" if result["failed"] else "does not count"
            axes.text(
                0, place, f" {why}", va="center", fontsize=8, color="#888888"
            )
    # Room for the values.
    axes.set_xlim(0, axes.get_xlim()[1] * 1.25)
    label_rows(axes, rows, _field_title)
    if name != _FIELD[0][0]:
        axes.set_yticklabels([])


def _field_title(row: str) -> str:
    return FIELD_TITLES[row]
