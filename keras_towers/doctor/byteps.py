"""The engine that sums on servers."""

from __future__ import annotations

from typing import Any

from keras_towers.building.recipe import Found
from keras_towers.doctor.findings import Finding, Status

_INSTALL = "keras-towers install byteps"


def finding(facts: dict[str, Any], byteps: Found | None) -> Finding:
    """Say what was found of BytePS.

    Args:
        facts: about TensorFlow and the machine, from ``probe``.
        byteps: what was found, None if it is not installed.
    """
    group, name = "Engines", "BytePS"
    if byteps is None:
        advice = f"To sum gradients on servers: {_INSTALL}."
        return Finding(group, name, "not installed", Status.NOTE, advice)
    value = byteps.version
    if not byteps.loads:
        return Finding(
            group,
            name,
            f"{value}; does not load: {byteps.error}",
            Status.BAD,
            f"Build BytePS for this TensorFlow and this machine: "
            f"{_INSTALL} --rebuild.",
        )
    value += f"; built with {byteps.built_in}"
    if facts.get("gpus") and not byteps.parts.get("NCCL"):
        advice = (
            "BytePS was built without CUDA, and takes gradients from the host; "
            f"to take them from GPUs: {_INSTALL} --with-nccl."
        )
        return Finding(group, name, value, Status.WARNING, advice)
    return Finding(group, name, value)
