# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Train a Boltzmann machine on handwritten digits, evaluate it exactly, and draw from it.

``python -m ebmpp`` needs the package, its extra ``plots``, and no data except
scikit-learn's digits. It trains the same machine by persistent contrastive divergence
(PCD) for comparison, with ten steps for each of UCD, as these cost a tenth. It writes
four pictures, the model, and two ArviZ files to one folder. It uses public names only,
as your own program would. ``models/rbm.py`` in the repository has more options: other
data, estimators and sizes.
"""

import argparse
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpyro.infer import MCMC
import xarray as xr

import jax
from jax import Array
import jax.monitoring
import optax

import ebmpp
from ebmpp import Bernoulli, FitResult
from ebmpp.core import Params, State
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Estimator
from ebmpp.training import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# an exact likelihood sums 2**20 states in 0.3 s; each further unit doubles that
_MAX_LATENT = 20
_MIN_STEPS = 100  # with fewer the model stays close to independent pixels
_NUM_HELD_OUT = 300  # of 1797 images
# of PCD; UCD has half as many pairs, so that both move as many chains
_NUM_CHAINS = 100
_TEMPERATURES = 1000  # of annealing, in each direction
_NUM_PAIRS = 100  # from noise: one compiled loop; with more there are two
_NUM_SAMPLES = 64
_WARMUP = 1000
_DRAWS = 100
_THINNING = 20


class Method(NamedTuple):
    """An estimator with the best of four learning rates, and the look of its curve."""

    estimator: Estimator
    rate: float
    steps: int
    """Steps for each step of UCD."""
    style: str
    color: str


# benchmarks/papers/learning_rates.py compares the rates
METHODS = {
    "UCD": Method(ebmpp.UCD(num_pairs=_NUM_CHAINS // 2), 0.03, 1, "o-", "#1a202c"),
    "PCD": Method(ebmpp.PCD(num_chains=_NUM_CHAINS), 0.01, 10, "s--", "#cc79a7"),
}


class Run(NamedTuple):
    """A fit, and the seconds that it took until each value of its monitors."""

    fit: FitResult
    seconds: list[float]


# -- options -------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options; exit with a message for a wrong one or a missing extra."""
    parser = argparse.ArgumentParser(
        "python -m ebmpp", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("ebmpp-digits"),
        help="folder for all files (default: %(default)s)",
    )
    steps = f"gradient steps, at least {_MIN_STEPS} (default: %(default)s)"
    add("--steps", type=int, default=1000, help=steps)
    add(
        "--latent",
        type=int,
        default=20,
        help=f"latent units, 1 to {_MAX_LATENT} (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the split, training and samples (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if find_spec("matplotlib") is None:
        parser.error(
            "the pictures need matplotlib, from the extra plots: pip install 'ebmpp[plots]'"
        )
    if args.steps < _MIN_STEPS:
        parser.error(
            f"--steps must be at least {_MIN_STEPS}, got {args.steps}: fewer train next to nothing"
        )
    if not 1 <= args.latent <= _MAX_LATENT:
        parser.error(
            f"--latent must be from 1 to {_MAX_LATENT}, got {args.latent}: their states are summed"
        )
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed must be from 0 to {2**32 - 1}, got {args.seed}")
    try:  # before time is spent
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        parser.error(f"--out {args.out} cannot be a folder: {error.strerror}")
    return args


# -- what is printed -----------------------------------------------------------------


class StageTimer:
    """Timer of the program's stages, which prints one line for each."""

    def __init__(self) -> None:
        self._compiling = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self._compiling += duration_secs

    @contextmanager
    def __call__(self, name: str, *, progress_bar: bool = False) -> Generator[None]:
        """Time a stage; a progress bar gets the next line for itself."""
        begin = time.monotonic()
        compiling = self._compiling
        print(f"{name:<46}", end="\n" if progress_bar else "", flush=True)
        yield
        seconds = time.monotonic() - begin
        compiling = self._compiling - compiling
        indent = " " * 46 if progress_bar else ""
        print(
            f"{indent}{seconds:6.1f} s, {compiling:4.1f} s of them compiling",
            flush=True,
        )


def show(name: str, value: str) -> None:
    """Print one result."""
    print(f"{name:<31}{value}", flush=True)


# -- data, training, samples ---------------------------------------------------------


def digits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return binary images of 8x8 pixels, one per row: those for training, and those held out."""
    rows = np.random.default_rng(seed).permutation(
        ebmpp.data.binarize(ebmpp.data.digits())
    )
    return rows[_NUM_HELD_OUT:], rows[:_NUM_HELD_OUT]


def independent_pixels(train: np.ndarray, held_out: np.ndarray) -> float:
    """Return the held-out mean log-likelihood of independent pixels: what a model must beat."""
    rate = (train.sum(0) + 1) / (len(train) + 2)
    return float(
        (held_out * np.log(rate) + (1 - held_out) * np.log1p(-rate)).sum(1).mean()
    )


def learn(
    rbm: ebmpp.FactorGraph,
    method: Method,
    train: np.ndarray,
    held_out: np.ndarray,
    steps: int,
    seed: int,
) -> Run:
    """Train with large steps first, while chains mix fast; larger ones in a shorter run."""
    rate = method.rate * (1000 / min(steps, 1000)) ** 0.5
    steps *= method.steps
    began = time.monotonic()
    seconds: list[float] = []

    def look(progress: Progress) -> None:
        seconds.append(time.monotonic() - began)

    fit = ebmpp.fit(
        rbm,
        train,
        estimator=method.estimator,
        optimizer=optax.adam(optax.cosine_decay_schedule(rate, steps, alpha=0.02)),
        num_steps=steps,
        batch_size=100,
        rng_key=jax.random.key(seed),
        monitors={
            "log_likelihood_held_out": ebmpp.monitors.log_likelihood(rbm, held_out)
        },
        monitor_every=max(1, steps // 10),
        callbacks=[look],
        progress_bar=sys.stderr.isatty(),
    )
    return Run(fit, seconds)


def ink(state: State) -> Array:
    """Return the number of black pixels."""
    return state["v"].sum()


def sample(rbm: ebmpp.FactorGraph, params: Params, seed: int) -> MCMC:
    """Run chains from uniform draws, without help from the data."""
    mcmc = MCMC(
        ebmpp.BlockedGibbs(rbm),
        num_warmup=_WARMUP,
        num_samples=_DRAWS * _THINNING,
        thinning=_THINNING,
        num_chains=_NUM_SAMPLES,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed + 1), params)
    return mcmc


# -- what is written -----------------------------------------------------------------


def learning_curve(runs: dict[str, Run], baseline: float) -> "Figure":
    """Plot exact likelihoods along training for each estimator, and meeting times of the first."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 4), layout="constrained", gridspec_kw={"wspace": 0.1}
    )
    for name, run in runs.items():
        look = METHODS[name]
        left.plot(
            run.seconds,
            run.fit.history.log_likelihood_held_out,
            look.style,
            color=look.color,
            markersize=4,
            label=f"{name}, {run.fit.history.sizes['step']} steps",
        )
    left.axhline(baseline, color="0.3", linestyle=":", label="independent pixels")
    left.set(
        xlabel="seconds, with compilation and these likelihoods",
        ylabel="nats per image",
        title="exact log-likelihood of held-out images",
    )
    left.legend(loc="center right", frameon=False)
    left.spines[["top", "right"]].set_visible(False)
    history = runs["UCD"].fit.history
    ebmpp.plots.plot_history(
        history[["meeting_time_mean", "meeting_time_max", "lag"]], axes=[right]
    )
    right.legend(loc="lower right", handlelength=3.2, frameon=False)
    right.set_title("meeting times of UCD's coupled chains")
    return figure


def draw(
    out: Path,
    runs: dict[str, Run],
    means: np.ndarray,
    baseline: float,
    real: np.ndarray,
    met: Any,
) -> None:
    """Write the four pictures as PNG files."""
    from matplotlib import pyplot as plt

    plt.switch_backend("agg")  # pictures go to files, not to a window
    plots = ebmpp.plots
    pictures: dict[str, Any] = {"learning_curve": learning_curve(runs, baseline)}
    weights = np.asarray(runs["UCD"].fit.params["v:h"]).T
    axes = plots.plot_units(weights, (8, 8))
    axes.set_title(f"weights of {len(weights)} latent units to the pixels", fontsize=10)
    pictures["filters"] = axes.figure
    pictures["samples"], axes = plt.subplots(
        1, 2, figsize=(9, 4.9), layout="constrained"
    )
    sweeps = _WARMUP + _DRAWS * _THINNING
    titles = (
        "real images, held out",
        f"samples: E[v | h] after {sweeps} sweeps from noise",
    )
    for ax, title, images in zip(axes, titles, (real, means), strict=True):
        plots.plot_units(images, (8, 8), ax=ax).set_title(title, fontsize=10)
    axes = plots.plot_meeting_times(met)
    axes.set_title(
        f"share of {len(met.met)} pairs from noise that have not met", fontsize=10
    )
    pictures["meeting_times"] = axes.figure
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png", dpi=130, bbox_inches="tight")
        plt.close(figure)


def save(
    out: Path,
    rbm: ebmpp.FactorGraph,
    runs: dict[str, Run],
    mcmc: MCMC,
    held_out: np.ndarray,
) -> None:
    """Write the draws and the histories for ArviZ, and the model."""
    draws = ebmpp.to_datatree(mcmc)
    draws["observed_data"] = xr.DataTree(
        xr.Dataset({"v": (("row", "v_dim_0"), held_out)})
    )
    draws.to_netcdf(out / "draws.nc", engine="h5netcdf")
    unbiased = runs["UCD"].fit
    history = ebmpp.to_datatree(unbiased)
    history["history_pcd"] = xr.DataTree(runs["PCD"].fit.history)
    history.to_netcdf(out / "history.nc", engine="h5netcdf")
    ebmpp.save(out / "digits.ebmpp", rbm, unbiased.params)


_NEXT = """
Open {out}/samples.png and {out}/learning_curve.png first. Then, from Python:
  ArviZ (pip install arviz):
    az.plot_trace(az.from_netcdf("{out}/draws.nc"), var_names=["h"])
    In a program of your own on Python 3.11 (arviz 0.23):
      az.plot_trace(ebmpp.diagnostics.to_arviz(mcmc))
  A report of the model, in a minute:
    rbm, params = ebmpp.load("{out}/digits.ebmpp")
    images = ebmpp.data.binarize(ebmpp.data.digits())
    ebmpp.report(rbm, params, images, rng_key=jax.random.key(0), file="{out}/report.html")
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, sample, draw and save."""
    args = parse(argv)
    try:
        ebmpp.enable_compilation_cache()
    except ArgumentError as error:
        print(f"Compiled programs are not stored: {error}", file=sys.stderr)
    stage = StageTimer()
    has_bar = sys.stderr.isatty()
    train, held_out = digits(args.seed)
    baseline = independent_pixels(train, held_out)
    rbm = ebmpp.layered(v=Bernoulli(64), h=Bernoulli(args.latent))
    print(rbm, flush=True)
    runs: dict[str, Run] = {}
    for name, method in METHODS.items():
        steps = args.steps * method.steps
        with stage(f"training by {name}, {steps} steps", progress_bar=has_bar):
            runs[name] = learn(rbm, method, train, held_out, args.steps, args.seed)
    params = runs["UCD"].fit.params
    with stage("evaluating: log Z, likelihood, meeting times"):
        gap = float(ebmpp.monitors.free_energy_gap(rbm, train, held_out)(params))
        key = jax.random.key(args.seed + 2)
        log_z = ebmpp.bracket(rbm, params, rng_key=key, num_temperatures=_TEMPERATURES)
        met = ebmpp.unbiased_expectation(
            rbm, params, ink, rng_key=key, num_pairs=_NUM_PAIRS, k=200, m=1000
        )
    with stage(f"sampling: {_NUM_SAMPLES} chains"):
        mcmc = sample(rbm, params, args.seed)
        # one per chain, so independent
        latent = mcmc.get_samples(group_by_chain=True)["h"][:, -1]
        means = np.asarray(rbm.mean(params, {"h": latent}, "v"))
    with stage("drawing and saving"):
        draw(args.out, runs, means, baseline, held_out[:_NUM_SAMPLES], met)
        save(args.out, rbm, runs, mcmc, held_out)

    last = {
        name: float(run.fit.history.log_likelihood_held_out[-1])
        for name, run in runs.items()
    }
    show("log-likelihood, held out", f"{last['UCD']:.2f} nats per image, exact")
    between = f"{log_z.lower.log_partition:.2f} to {log_z.upper.log_partition:.2f} by annealing"
    show("log Z", f"{between} from both sides, {log_z.exact:.2f} exactly")
    show("log-likelihood, training", f"{last['UCD'] + gap:.2f}")
    steps = runs["PCD"].fit.history.sizes["step"]
    show("PCD, held out", f"{last['PCD']:.2f} after {steps} steps at a lower rate")
    show("independent pixels, held out", f"{baseline:.2f}")
    times = (
        f"mean {met.meeting_time.mean():.0f}, max {met.meeting_time.max():.0f} sweeps"
    )
    show("meeting time", f"{times}, {_NUM_PAIRS} pairs from noise")
    unbiased = f"{met.value:.2f} +- {met.standard_error:.2f} by an unbiased estimate"
    show("black pixels per image", f"{unbiased}, {train.sum(1).mean():.2f} in the data")
    print(_NEXT.format(out=args.out))


if __name__ == "__main__":
    main()
