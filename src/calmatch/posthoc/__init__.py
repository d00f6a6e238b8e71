"""Confidence made honest after training: scalings, prediction sets, and when to say "not sure"."""

from __future__ import annotations

from calmatch.posthoc.scaling import (
    SCALINGS,
    Scaling,
    crossfit_temperature,
    identity,
    isotonic,
    load,
    oracle_scaled,
    temperature,
    temperature_scaled,
    vector,
)
from calmatch.posthoc.sets import Conformal, conformal, load_conformal
from calmatch.posthoc.sure import Selective, load_selective, needed, selective
from calmatch.posthoc.unlabelled import Agreement, agreement, agreement_temperature

__all__ = [
    "SCALINGS",
    "Agreement",
    "Conformal",
    "Scaling",
    "Selective",
    "agreement",
    "agreement_temperature",
    "conformal",
    "crossfit_temperature",
    "identity",
    "isotonic",
    "load",
    "load_conformal",
    "load_selective",
    "needed",
    "oracle_scaled",
    "selective",
    "temperature",
    "temperature_scaled",
    "vector",
]
