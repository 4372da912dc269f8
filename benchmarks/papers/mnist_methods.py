# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Methods of ``mnist_rbm.py``: experiments of Upadhya and Sastry (2017) and of Qiu et
al. (2020)."""

from collections.abc import Callable
import dataclasses
import functools
from typing import NamedTuple

import optax

from ebmpp import CD, PCD, UCD, FactorGraph, Stage
from ebmpp.contrib import CSDCP, SDCP, spectral_descent
from ebmpp.estimators import Centered, Estimator

Stages = Callable[[FactorGraph, int, float], list[Stage]]
"""Function of a graph, a number of batches and a rate."""


class Method(NamedTuple):
    """A way to train."""

    label: str
    stages: Stages
    updates: int = 1
    """Steps per batch."""
    sweeps: float | None = None
    """Sweeps of a chain per batch, where that is known beforehand."""
    rate: float | None = None
    """Replaces the experiment's."""
    batch_size: int | None = None
    """Replaces the experiment's."""
    start: tuple[float, str] = (0.01, "base_rate")
    """Standard deviation of the first weights, and ``bias`` of the initialisation."""
    panel: int = 0
    """Index of the panel."""
    minutes: float | None = None
    """Minutes of training, as printed."""


class Experiment(NamedTuple):
    """One figure of a paper."""

    title: str
    latent: int
    batch_size: int
    rate: float
    methods: dict[str, Method]
    printed: str
    panels: tuple[str, ...] = ("",)


@dataclasses.dataclass(frozen=True)
class SameBatch(CD):
    """CD with several consecutive steps per batch, whose chains start at the rows in each of them.

    This is S-DCP without its fixed positive phase and its persistent chains.
    """

    steps: int = 1

    @property
    def steps_per_batch(self) -> int:
        """Steps per batch."""
        return self.steps


@functools.cache  # a new transformation would compile again
def _sgd(rate: float) -> optax.GradientTransformation:
    return optax.sgd(rate)


def plain(estimator: Estimator, updates: int = 1) -> Stages:
    """Return plain gradient steps, ``updates`` per batch."""
    return lambda _, batches, rate: [
        Stage(num_steps=batches * updates, estimator=estimator, optimizer=_sgd(rate))
    ]


@functools.cache
def _spectral(graph: FactorGraph, rate: float) -> optax.GradientTransformation:
    return spectral_descent(rate, graph)


def spectral(graph: FactorGraph, batches: int, rate: float) -> list[Stage]:
    """Return spectral descent, whose step is as long as the sum of all singular values:
    rates are small."""
    return [
        Stage(num_steps=batches, estimator=CD(k=24), optimizer=_spectral(graph, rate))
    ]


def warmed(_: FactorGraph, batches: int, rate: float) -> list[Stage]:
    """Return PCD for five in six batches (500 of 600), then UCD at a tenth of the rate."""
    first = max(1, batches * 5 // 6)
    after = UCD(num_pairs=1000, init="persistent")
    return [
        Stage(
            num_steps=first, estimator=PCD(k=1, num_chains=1000), optimizer=_sgd(rate)
        ),
        Stage(
            num_steps=max(1, batches - first),
            estimator=after,
            optimizer=_sgd(rate / 10),
        ),
    ]


def dcp(centered: bool, d: int = 6, name: str = "", **changed: object) -> Method:
    """Return S-DCP or CS-DCP with d inner steps, 24 sweeps in all."""
    estimator = (CSDCP if centered else SDCP)(d=d, k=24 // d)
    label = name or ("CS-DCP" if centered else "S-DCP") + f", d = {d}, K' = {24 // d}"
    return Method(label, plain(estimator, d), d, 24, panel=int(centered))._replace(
        **changed
    )


def both(prefix: str, **options: object) -> dict[str, Method]:
    """Return S-DCP and CS-DCP with the same options, one panel each."""
    return {
        f"{kind}_{prefix}": dcp(kind == "csdcp", **options)
        for kind in ("sdcp", "csdcp")
    }


_DC = {
    "cd": Method("CD-24", plain(CD(k=24)), sweeps=24),
    "cd4": Method(
        "CD-4, six steps a batch (the control)",
        plain(SameBatch(k=4, steps=6), 6),
        6,
        sweeps=24,
    ),
    "pcd": Method("PCD-24", plain(PCD(k=24, num_chains=200)), sweeps=24),
    "cg": Method("centered gradient, CD-24", plain(Centered(CD(k=24))), sweeps=24),
    "sdcp": dcp(False),
    "csdcp": dcp(True, panel=0),
}
_SPECTRAL = (0.0001, 0.0003, 0.001, 0.003, 0.01)
_PANELS = ("S-DCP", "CS-DCP")
_PUBLISHED = UCD(num_pairs=1000, k=1, lag=1, max_sweeps=100, allow_unmet=True)


def _rates() -> dict[str, Method]:
    return {
        name: method
        for rate in (0.01, 0.03, 0.1)
        for name, method in both(f"{rate:g}", name=f"rate {rate:g}", rate=rate).items()
    }


def _inner() -> dict[str, Method]:
    def text(d):
        return f"d = {d}, K' = {24 // d}"

    return {
        name: method
        for d in (2, 4, 6, 12, 24)
        for name, method in both(str(d), d=d, name=text(d)).items()
    }


def _batches() -> dict[str, Method]:
    return {
        f"sdcp_{size}": dcp(False, name=f"batches of {size}", batch_size=size)
        for size in (100, 200, 500, 1000)
    }


def _starts() -> dict[str, Method]:
    table = [(0.001, "zero"), (0.01, "zero"), (0.001, "base_rate"), (0.01, "base_rate")]

    def text(n, s, b):
        return f"Init {n}: sigma {s:g}, b {'0' if b == 'zero' else 'base rate'}"

    return {
        name: method
        for n, start in enumerate(table, 1)
        for name, method in both(str(n), name=text(n, *start), start=start).items()
    }


EXPERIMENTS = {
    "dc": Experiment(
        "784x500, batches of 200",
        500,
        200,
        0.01,
        _DC,
        "CS-DCP ahead at rate 0.01, 90 % of the maximum some 100 epochs before the "
        "centered gradient; all nearly alike after 200 epochs",
    ),
    "spectral": Experiment(
        "784x500, batches of 1000",
        500,
        1000,
        0.01,
        {
            **{
                f"ssd_{rate:g}": Method(
                    f"spectral descent, rate {rate:g}", spectral, sweeps=24, rate=rate
                )
                for rate in _SPECTRAL
            },
            **{name: _DC[name] for name in ("cd", "sdcp", "csdcp")},
        },
        "CS-DCP and spectral descent alike and ahead of all others; spectral descent a "
        "little sooner, and falling at the end of 250 epochs",
    ),
    "rates": Experiment(
        "784x500",
        500,
        200,
        0.01,
        _rates(),
        "at rate 0.01 the likelihood rises at most epochs",
        _PANELS,
    ),
    "inner": Experiment(
        "784x500, rate 0.01",
        500,
        200,
        0.01,
        _inner(),
        "the larger d, the sooner; the same in the end whatever d",
        _PANELS,
    ),
    "batches": Experiment(
        "784x500, rate 0.01",
        500,
        200,
        0.01,
        _batches(),
        "nearly the same after 200 epochs",
    ),
    "starts": Experiment(
        "784x500, rate 0.01",
        500,
        200,
        0.01,
        _starts(),
        "little difference between starts",
        _PANELS,
    ),
    "ucd": Experiment(
        "784x1000, batches of 1000",
        1000,
        1000,
        0.1,
        {
            "cd1": Method("CD-1", plain(CD(k=1)), sweeps=1, minutes=25.63),
            "cd10": Method("CD-10", plain(CD(k=10)), sweeps=10, minutes=114.85),
            "cd20": Method("CD-20", plain(CD(k=20)), sweeps=20, minutes=212.22),
            "cd30": Method("CD-30", plain(CD(k=30)), sweeps=30, minutes=311.89),
            "pcd": Method(
                "PCD-1, 1000 chains",
                plain(PCD(k=1, num_chains=1000)),
                sweeps=1,
                minutes=25.53,
            ),
            "published": Method(
                "UCD, k = lag = 1, stopped at 100 sweeps",
                plain(_PUBLISHED),
                minutes=494.01,
            ),
            "ucd": Method("UCD, adaptive, 1000 pairs", plain(UCD(num_pairs=1000))),
            "pcd_ucd": Method("PCD, then UCD at a tenth of the rate", warmed),
        },
        "CD falls, PCD swings, UCD rises to the end; mean meeting time about 27; UCD "
        "takes 19 times the time of PCD",
    ),
}
