"""Pictures of what was measured; this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.rows import FIELD
from keras_towers.bench.rows import ROWS, find
from keras_towers.doctor.probe import describe_machine, machine_facts
from keras_towers.errors import TowerError

# The kinds of rows: their colour, and what the legend says.
KINDS = {
    "default": ("#1f6feb", "keras_towers, default strategy"),
    "ours": ("#8db8f7", "keras_towers, others"),
    "tensorflow": ("#d9822b", "TensorFlow"),
    "horovod": ("#8a5a44", "Horovod"),
    "torch": ("#8e6bb0", "PyTorch"),
    "jax": ("#2a9d8f", "JAX"),
    "plain": ("#9aa0a6", "plain Keras"),
}
# Phases of a step, in the order of the legend.
PHASES = {
    "input": "#d9822b",
    "compute": "#1f6feb",
    "step": "#1f6feb",
    "wait": "#d0d7de",
    "reduction": "#8e6bb0",
    "update": "#2da44e",
    "callbacks": "#8a5a44",
}
# What scaling measured with real ranks.
ENGINES = {
    "HorovodStrategy": ("Horovod, by rank", "#8a5a44"),
    "MultiWorkerTowerStrategy": ("multi-worker, by rank", "#d9822b"),
    "DistributedParameterServerStrategy": ("one server, at it", "#1f6feb"),
}
# Columns of a picture: the figure, its factor, and its title.
_COLUMNS = (
    ("examples_per_s", 1, "examples per second"),
    ("efficiency", 100, "efficiency, %"),
    ("step_ms", 1, "step, ms: compute (dark) and rest"),
    ("first_step_s", 1, "first step, s"),
)


def kind(name: str) -> str:
    """Return which of ``KINDS`` a row belongs to."""
    row = find({**FIELD, **ROWS}, name)
    if row.name in ("tower", "horovod"):
        return "default"
    if row.ours:
        return "ours"
    if row.name.startswith(("plain", "compute")):
        return "plain"
    return row.engine or row.backend


def draw(documents: Sequence[Any], steps: int) -> Figure:
    """Draw what a comparison, ``kt.Timeline`` or ``scaling`` has written."""
    first = documents[0]
    if isinstance(first, list):
        machine = describe_machine(machine_facts(timeout_s=60))
        return draw_scaling([*chain.from_iterable(documents)], machine)
    if "traceEvents" in first:
        return draw_timeline(first, steps)
    return draw_results(first)


def draw_results(document: dict[str, Any]) -> Figure:
    """Draw a panel for each figure, model and number of replicas."""
    panels: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in document["results"]:
        key = result["model"], result["replicas"]
        panels.setdefault(key, []).append(result)
    columns = [
        column
        for column in _COLUMNS
        if any(result.get(column[0]) for result in document["results"])
    ]
    heights = [0.9 + 0.24 * len(panel) for panel in panels.values()]
    figure = Figure(
        figsize=(4.5 + 2.7 * len(columns), 1.4 + sum(heights)),
        layout="constrained",
    )
    grid = figure.subplots(
        *(len(panels), len(columns)),
        squeeze=False,
        sharey="row",
        height_ratios=heights,
    )
    for across, (key, results) in zip(grid, panels.items(), strict=True):
        for axes, (name, factor, title) in zip(across, columns, strict=True):
            _draw_panel(axes, results, name, factor)
            axes.set_title(title, fontsize=9)
        model, count = key
        noun = "replica" if count == 1 else "replicas"
        title = f"{model}, {count} {noun}: {columns[0][2]}"
        across[0].set_title(title, fontsize=9)
    settings, repeats = document["settings"], document["settings"]["repeats"]
    often = f"median of {repeats} runs" if repeats > 1 else "one run each"
    figure.supxlabel(
        f"{describe_machine(document['machine'])}\nglobal batch "
        f"{settings['batch']}; {often}",
        fontsize=8,
    )
    drawn = {kind(result["row"]) for result in document["results"]}
    _legend(figure, [KINDS[name] for name in KINDS if name in drawn], 3)
    return figure


def _legend(
    figure: Figure, entries: Iterable[tuple[str, str]], columns: int
) -> None:
    """Put colours and their meanings above a picture."""
    figure.legend(
        handles=[Patch(color=colour, label=said) for colour, said in entries],
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )


def _draw_panel(
    axes: Any, results: list[dict[str, Any]], name: str, factor: float
) -> None:
    """Draw a bar for each row, its range, and its value behind both."""
    for place, result in enumerate(results):
        why = "failed" if result["failed"] else "does not count"
        if not result.get(name) and (result["failed"] or result["reason"]):
            axes.text(0, place, f" {why}", va="center", fontsize=8)
    bars = [(k, result) for k, result in enumerate(results) if result.get(name)]
    for place, result in bars:
        low, median, high = (
            factor * result[name][key] for key in ("low", "median", "high")
        )
        colour, _ = KINDS[kind(result["row"])]
        error = [[median - low], [high - median]]
        bar = axes.barh(
            place, median, 0.72, xerr=error, color=colour, ecolor="#444444"
        )
        if name == "step_ms" and result["cost_ms"]:
            compute = max(0, median - max(0, result["cost_ms"]["median"]))
            axes.barh(place, compute, 0.72, color="#000000", alpha=0.35)
        decimals = 2 if median < 10 else 1
        axes.bar_label(bar, fmt=f"%.{decimals}f", padding=3, fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, labelsize=8)
    axes.set_yticks(range(len(results)), [r["row"] for r in results])
    # Only the first panel of several has labels.
    for label, result in zip(axes.get_yticklabels(), results, strict=False):
        bold = kind(result["row"]) == "default"
        label.set_weight("bold" if bold else "normal")
    axes.set_ylim(len(results) - 0.5, -0.5)
    # Room for the values.
    axes.set_xlim(0, axes.get_xlim()[1] * 1.25)


def draw_timeline(trace: dict[str, Any], steps: int) -> Figure:
    """Draw some steps of a trace, a bar for each event."""
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    begin, end = _window(events, steps)
    rows = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    size = 10, 1.2 + 0.45 * len(rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    drawn = set()
    for event in events:
        inside = begin <= event["ts"] < end
        if not inside or event["name"] not in PHASES:
            continue
        drawn.add(event["name"])
        axes.barh(
            list(rows).index((event["pid"], event["tid"])),
            event["dur"] / 1e3,
            left=(event["ts"] - begin) / 1e3,
            color=PHASES[event["name"]],
            height=0.72,
        )
    axes.set_yticks(range(len(rows)), list(rows.values()), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("milliseconds", fontsize=8)
    axes.tick_params(left=False, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    entries = [(colour, name) for name, colour in PHASES.items()]
    _legend(figure, [e for e in entries if e[1] in drawn], len(PHASES))
    return figure


def _window(events: list[dict[str, Any]], steps: int) -> tuple[float, float]:
    """Where the last steps but one begin and end, in microseconds."""
    begins: dict[Any, float] = {}
    for index, event in enumerate(events):
        step = event["args"].get("step")
        if step is None and event["name"] == "step":
            # Those of towers that have no step in common have no number.
            step = index
        if step is not None:
            begins[step] = min(begins.get(step, event["ts"]), event["ts"])
    last = sorted(begins.values())[-steps - 1 :]
    if len(last) < 2 or last[0] == last[-1]:
        raise TowerError(
            "the trace has fewer than two steps: give one of a longer fit"
        )
    return last[0], last[-1]


def draw_scaling(rows: list[dict[str, Any]], machine: str) -> Figure:
    """Draw requests, seconds and bytes against the number of ranks."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    requests, seconds, sent = figure.subplots(1, 3)

    def requests_a_second(row: dict[str, Any]) -> float:
        return float(row["requests_first"] / row["seconds"])

    def plot(
        axes: Any,
        what: str,
        value: Callable[[dict[str, Any]], float],
        label: str,
        colour: str,
    ) -> None:
        found = sorted(
            (r["ranks"], value(r)) for r in rows if r["what"] == what
        )
        # Others lie on the line of the ring.
        style = "o:" if what.startswith("MultiWorker") else "o-"
        axes.plot(*zip(*found, strict=True), style, label=label, color=colour)

    plot(requests, "idle", requests_a_second, "training", "#1f6feb")
    plot(requests, "stall", requests_a_second, "all wait for one", "#d9822b")
    requests.set_title("requests a second, at the store", fontsize=9)
    plot(
        seconds, "meet", lambda r: r["seconds"], "met by themselves", "#1f6feb"
    )
    plot(seconds, "launch", lambda r: r["seconds"], "by ssh", "#d9822b")
    plot(
        seconds,
        "launch",
        lambda r: r["launcher_cpu_s"],
        "by ssh: CPU of the launcher",
        "#9aa0a6",
    )
    seconds.set_title("seconds until all have met, on two cores", fontsize=9)
    for what, (label, colour) in ENGINES.items():
        plot(
            sent,
            what,
            lambda r: r["sent_first"] / r["steps"] / 1e6,
            label,
            colour,
        )
    sent.set_title("MB sent in a step, for 1 MB of gradients", fontsize=9)
    for axes in (requests, seconds, sent):
        axes.set_xlabel("ranks")
        axes.set_ylim(0)
        axes.set_xlim(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.supxlabel(machine, fontsize=8)
    return figure
