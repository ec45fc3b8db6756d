"""``keras-towers verify``: whether a model splits over towers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keras_towers import user_functions
from keras_towers.errors import CompatibilityError, TowerError

if TYPE_CHECKING:
    from keras_towers.verification.report import Report


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns a compiled model "
            "and data, as for fit: (model, x), (model, x, y), (model, x, y, "
            "sample_weight) or (model, dataset).",
        ),
    ],
    towers: Annotated[
        int, typer.Option(help="Number of towers, 2 or more.")
    ] = 2,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples in a batch of arrays.")
    ] = None,
    steps: Annotated[int, typer.Option(help="How many steps to rehearse.")] = 3,
    exact: Annotated[
        bool, typer.Option("--exact", help="As TowerStrategy(exact=True).")
    ] = False,
    summed: Annotated[
        bool, typer.Option("--sum", help="As TowerStrategy(average=False).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text.")
    ] = False,
) -> None:
    """Say whether a model trains as on one device, or why not.

    Its training step is analysed, and rehearsed on a few batches.

    The exit code is 0 if it does, 1 if it does not, and 2 if that cannot be
    found out.
    """
    try:
        model, *data = _built(target)
        from keras_towers import verify as ask

        report = ask(
            model,
            *data,
            towers=towers,
            batch_size=batch_size,
            steps=steps,
            exact=exact,
            average=not summed,
        )
    except CompatibilityError as error:
        raise TowerError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(_told(report), indent=2))
    else:
        typer.echo(str(report))
    if not report.safe:
        raise typer.Exit(1)


def _told(report: Report) -> dict[str, Any]:
    told: dict[str, Any] = {"safe": report.safe, "verdict": report.verdict}
    told |= dataclasses.asdict(report)
    for finding in told["findings"]:
        size = finding["difference"]
        # JSON has no infinity.
        if size is not None and not math.isfinite(size):
            finding["difference"] = None
    return told


def _built(target: str) -> tuple[Any, ...]:
    """Call the function that is named, or raise ``TowerError``."""
    built = user_functions.call(target)
    if not isinstance(built, tuple) or not 2 <= len(built) <= 4:
        raise TowerError(
            f"{target} has to return (model, x), (model, x, y), (model, x, y, "
            f"sample_weight) or (model, dataset), but returned {built!r:.200}."
        )
    return built
