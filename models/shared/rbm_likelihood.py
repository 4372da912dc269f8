# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The recipe ``likelihood`` of rbm.py: training of a machine too large to sum, and
bounds of its likelihood.

Training is PCD with centered gradients: batches of 384 rows and 384 chains, momentum
0.5, a rate that falls linearly from 0.2 to 0, and a weight decay of 1.5e-4. The model
is the mean of the last tenth of the iterates. With ``--binarize bernoulli`` a row is
drawn at random each time it is used, and one row in ten is shifted by a pixel, which
does not help beyond the error of log Z.

Four estimates of the log-likelihood are reported:

* ``particles``: log Z from particle systems, with the error of ten islands. It is too
  large on average, by about half the squared error.
* ``forward``: log Z annealed from independent units to the model. It is too large on
  average (a theorem).
* ``reverse``: log Z annealed from the model to independent units. It is too small on
  average if the runs start at exact draws. A model of this size has none: the runs
  start at chains of ``sweeps`` sweeps from training rows, and coupled pairs with the
  same starts bound their distance to the model's distribution. This is evidence, not a
  bound.
* ``annealed``: log-likelihood under the distribution of the last state of the forward
  run. Annealing back from held-out rows bounds it from below on average (a theorem).
  That distribution is the model's only in the limit of many temperatures.

**References**

1. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief networks*.
2. Melchior, Fischer, Wiskott (2016), *How to center deep Boltzmann machines*.
3. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood using
   bidirectional Monte Carlo*.
4. Burda, Grosse, Salakhutdinov (2015), *Accurate and conservative estimates of MRF
   log-likelihood using reverse annealing*.
"""

import argparse
from collections.abc import Callable
import json
import math
from pathlib import Path
import time
from typing import Any, NamedTuple
import warnings

import numpy as np

import jax
import optax

import ebmpp
from ebmpp import FactorGraph
from ebmpp.diagnostics import style
from ebmpp.errors import UnmetError
from shared import common, digit_images, likelihood_curve

DEFAULTS = {
    "latent": 500,
    "estimator": "pcd",
    "num_pairs": 384,
    "batch_size": 384,
    "steps": 40_000,
    "rate": 0.2,
}
DECAY = 1.5e-4
_MOMENTUM = 0.5
_AVERAGED = 0.1
_POINTS = 10  # of the learning curve
_ROWS = 10_000  # training rows at most whose likelihood is reported
_PARTICLES = 10  # particles of a system per particle of annealing
# Sweeps per temperature, along the run and in the end. With one sweep, ten times as
# many particles gave 0.8 nats more for a 784x500 machine, with an error of 0.2: sweeps
# reach its modes, particles do not.
_CURVE_SWEEPS = 4
_FINAL_SWEEPS = 20
_CESS_THRESHOLD = 0.98
_LADDER = "sigmoid"  # of the final estimates
_MOST_SWEEPS = 2  # limit of a pair, in sweeps of a chain


# -- training ------------------------------------------------------------------------


def optimizer(
    rate: float, steps: int, warm: float = 0.0, decay: float = DECAY
) -> optax.GradientTransformation:
    """Return momentum with a linearly falling rate, weight decay, and the mean of the
    last iterates.

    :param warm: share of the steps in which the rate rises from a fifth.
    :param decay: weight decay.
    """

    def weights(params):
        return {name: ":" in name for name in params}

    rising = math.floor(warm * steps)
    falling = optax.linear_schedule(rate, 0.0, steps - rising)
    rates = optax.join_schedules(
        [optax.linear_schedule(rate / 5, rate, rising), falling], [rising]
    )
    steepest = optax.sgd(rates if rising else falling, momentum=_MOMENTUM)
    decayed = optax.chain(optax.add_decayed_weights(decay, weights), steepest)
    return ebmpp.optimizers.averaged(
        decayed, from_step=math.floor((1 - _AVERAGED) * steps)
    )


class Curve:
    """Callback: estimates along a run in a file, which a resumed run continues.

    :param path: the file.
    :param estimate: function from params to numbers.
    """

    def __init__(
        self, path: Path, estimate: Callable[[Any], dict[str, float]], resume: bool
    ) -> None:
        self.path = path
        self._estimate = estimate
        self.points = json.loads(path.read_text()) if resume and path.exists() else []
        self._start = time.monotonic() - (
            self.points[-1]["seconds"] if self.points else 0
        )

    def __call__(self, progress: Any) -> None:
        """Add a point unless it exists; later points of a stopped run are dropped."""
        self.points = [p for p in self.points if p["step"] <= progress.step]
        if not self.points or self.points[-1]["step"] < progress.step:
            point = {
                "step": progress.step,
                "seconds": round(time.monotonic() - self._start, 1),
            }
            self.points.append(point | self._estimate(progress.params))
        self.path.write_text(json.dumps(self.points, indent=1))


def train(
    rbm: FactorGraph, args: argparse.Namespace
) -> tuple[Any, list[dict[str, float]]]:
    """Return the model's params and the learning curve."""
    data = args.images
    size = min(args.batch_size, len(args.images.train))
    curve = Curve(
        args.out / "curve.json",
        lambda params: _curve_point(rbm, params, args),
        args.resume,
    )
    fit = common.train(
        rbm,
        data.train
        if data.grey is None
        else digit_images.batches(data.grey, size, args.seed, data.shape),
        args,
        ebmpp.Centered(args.chosen),
        optimizer=optimizer(args.rate, args.steps, decay=args.decay),
        batch_size=size,
        callbacks=[curve],
        monitor_every=max(1, args.steps // _POINTS),
        checkpoint_dir=args.out / "checkpoints",
        checkpoint_every=max(1, args.steps // _POINTS),
        resume=args.resume,
    )
    return ebmpp.optimizers.averaged_params(fit.optimizer_state), curve.points


def _curve_point(
    rbm: FactorGraph, params: Any, args: argparse.Namespace
) -> dict[str, float]:
    """Return both likelihoods by particle systems, with the error of log Z that they share."""
    result = systems(rbm, params, args, args.seed + 3, _CURVE_SWEEPS)
    values = {
        part: result.average_log_likelihood(rows).value
        for part, rows in _parts(args).items()
    }
    return values | {
        "standard_error": result.standard_error,
        "effective": result.effective_sample_size,
    }


def _parts(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return the rows whose likelihood is reported."""
    return {"held_out": args.images.held_out, "train": args.images.train[:_ROWS]}


def systems(
    rbm: FactorGraph, params: Any, args: argparse.Namespace, seed: int, sweeps: int
) -> Any:
    """Estimate log Z by particle systems from the training rows' base rates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the effective size is reported
        return ebmpp.smc(
            rbm,
            params,
            rng_key=jax.random.key(seed),
            num_particles=_PARTICLES * args.particles,
            num_sweeps=sweeps,
            cess_threshold=_CESS_THRESHOLD,
            data=args.images.train,
        )


# -- evaluation ----------------------------------------------------------------------


class Evaluation(NamedTuple):
    """Measurements of a model."""

    brackets: list[ebmpp.annealing.Bracket]
    pairs: Any
    """Coupled pairs from training rows; None if none of them met."""
    numbers: dict[str, Any]


def starts(
    rbm: FactorGraph, params: Any, rows: np.ndarray, count: int, seed: int
) -> dict[str, np.ndarray]:
    """Draw latents given random training rows; a sweep that starts there draws the pixels first."""
    generator = np.random.default_rng(seed)
    v = rows[generator.integers(len(rows), size=count)]
    means = np.asarray(rbm.mean(params, {"v": v}, "h"))
    return {"h": (generator.random(means.shape, np.float32) < means).astype(np.float32)}


def chains(
    rbm: FactorGraph, params: Any, args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Return states of independent chains after ``sweeps`` sweeps from training rows."""
    init = starts(rbm, params, args.images.train, args.particles, seed)
    kernel = ebmpp.BlockedGibbs(rbm)
    run = common.chains(
        kernel, params, seed, warmup=args.sweeps - 1, count=args.particles, init=init
    )
    return run.get_samples()


def most_sweeps(args: argparse.Namespace) -> int:
    """Return the limit of a pair's sweeps, which is larger than its lag."""
    return max(_MOST_SWEEPS * args.sweeps, args.pair_lag + 1)


def pairs(rbm: FactorGraph, params: Any, args: argparse.Namespace) -> Any:
    """Return coupled pairs that start as :func:`chains` do; None if none of them met."""
    try:
        return ebmpp.unbiased_expectation(
            rbm,
            params,
            lambda x: x["v"].sum(),
            rng_key=jax.random.key(args.seed + 4),
            num_pairs=args.coupled,
            lag=args.pair_lag,
            init=starts(rbm, params, args.images.train, args.coupled, args.seed + 4),
            max_sweeps=most_sweeps(args),
            unmet="drop",
        )
    except UnmetError:  # no mean, but the model is reported all the same
        return None


def annealed(
    rbm: FactorGraph, params: Any, args: argparse.Namespace, seed: int
) -> np.ndarray:
    """Return log weights of annealing back from some held-out rows.

    A row's log weight minus its free energy is on average at most its log-likelihood
    under the distribution of the last state of forward annealing: the mean of the
    exponential is that likelihood.
    """
    rows = args.images.held_out
    index = np.random.default_rng(seed).choice(
        len(rows), min(args.particles, len(rows)), replace=False
    )
    result = ebmpp.annealing.reverse_ais(
        rbm,
        params,
        rng_key=jax.random.key(seed + 1000),
        samples={"v": rows[index]},
        num_temperatures=args.temperatures,
        ladder=_LADDER,
        data=args.images.train,
    )
    return result.log_weights


def evaluate(rbm: FactorGraph, params: Any, args: argparse.Namespace) -> Evaluation:
    """Return brackets of log Z from independent seeds, and the quality of the draws
    that they start from."""
    brackets = []
    increments = []
    for seed in range(args.seed + 100, args.seed + 100 + args.repeats):
        result = ebmpp.bracket(
            rbm,
            params,
            rng_key=jax.random.key(seed),
            samples=chains(rbm, params, args, seed),
            num_temperatures=args.temperatures,
            ladder=_LADDER,
            data=args.images.train,
        )
        brackets.append(result)
        increments.append(annealed(rbm, params, args, seed))
        print(f"{result}, annealed {increments[-1].mean():.2f}", flush=True)
    coupled = pairs(rbm, params, args)
    numbers = _numbers(brackets, coupled, args)
    numbers["particles"] = _by_particles(rbm, params, args)
    energy = float(np.mean(rbm.free_energy(params, {"v": args.images.held_out})))
    weights = np.concatenate(increments)
    numbers["annealed"] = {
        "held_out": weights.mean() - energy,
        "standard_error": weights.std(ddof=1) / math.sqrt(weights.size),
        "spread": weights.std(ddof=1),
        "rows": weights.size,
    }
    return Evaluation(brackets, coupled, numbers)


def _by_particles(
    rbm: FactorGraph, params: Any, args: argparse.Namespace
) -> dict[str, float]:
    """Return both likelihoods by particles of many sweeps."""
    result = systems(rbm, params, args, args.seed + 5, _FINAL_SWEEPS)
    values = {
        part: result.average_log_likelihood(r).value for part, r in _parts(args).items()
    }
    values |= {
        "log_partition": result.log_partition,
        "standard_error": result.standard_error,
    }
    values |= {
        "particles": len(result.weights),
        "rungs": result.num_rungs,
        "sweeps": _FINAL_SWEEPS,
    }
    spread = float(result.log_z.std(ddof=1))
    return values | {"spread": spread, "distinct_ancestors": result.distinct_ancestors}


def _numbers(brackets: list, coupled: Any, args: argparse.Namespace) -> dict[str, Any]:
    rows = _parts(args)
    numbers = {}
    # a lower log Z is a larger likelihood
    for side, name in (
        ("lower", "forward"),
        ("upper", "reverse"),
    ):
        sides = [getattr(b, side) for b in brackets]
        values = {
            part: [e.average_log_likelihood(r).value for e in sides]
            for part, r in rows.items()
        }
        values["log_partition"] = [e.log_partition for e in sides]
        values["standard_error"] = [e.standard_error for e in sides]
        values["effective"] = [e.effective_sample_size for e in sides]
        # all weights of all seeds are one sample of weights
        numbers[name] = values | {"pooled": _pooled(sides, rows["held_out"])}
    numbers["row_error"] = (
        brackets[0].lower.average_log_likelihood(rows["held_out"]).row_error
    )
    return numbers | {"meeting": _meeting_numbers(coupled, args)}


def _meeting_numbers(coupled: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Summarise the pairs; if none of them met, the distance is bounded by 1 only."""
    if coupled is None:
        count = args.coupled
        numbers = {
            "pairs": count,
            "lag": args.pair_lag,
            "unmet": count,
            "later_than_sweeps": count,
        }
        return numbers | {"tv_bound": 1.0, "tv_bound_upper": 1.0}
    tau = np.where(coupled.met, coupled.meeting_time, np.nan) - coupled.lag
    early = np.where(coupled.met, tau, np.inf) <= args.sweeps
    tv = ebmpp.tv_upper_bound(coupled, args.sweeps)
    return {
        "pairs": len(tau),
        "lag": coupled.lag,
        "mean_after_lag": float(np.nanmean(tau)),
        "max_after_lag": float(np.nanmax(tau)),
        "unmet": int(coupled.num_unmet),
        "later_than_sweeps": int((~early).sum()),
        "tv_bound": float(tv.bound[0]),
        "tv_bound_upper": float(tv.upper[0]),
    }


def _pooled(sides: list, rows: np.ndarray) -> dict[str, float]:
    """Return the mean log-likelihood with log Z from all seeds' weights, and its standard error."""
    log_weights = np.concatenate([e.log_weights for e in sides])
    sign = 1 if sides[0].bound == "lower" else -1
    top = log_weights.max()
    w = np.exp(log_weights - top)
    log_mean = math.log(w.mean()) + top
    # log_partition is sign * (log mean weight) for every seed; rows enter only by their
    # free energies
    value = (
        sides[0].average_log_likelihood(rows).value
        + sides[0].log_partition
        - sign * log_mean
    )
    error = w.std(ddof=1) / w.mean() / math.sqrt(len(w))
    return {
        "held_out": value,
        "standard_error": error,
        "effective": w.sum() ** 2 / (w**2).sum(),
    }


# -- report --------------------------------------------------------------------------


def draw(
    curve: list[dict[str, float]], result: Evaluation, args: argparse.Namespace
) -> dict[str, Any]:
    """Draw the learning curve with the final bounds, and the meeting times."""
    share = args.batch_size / len(args.images.train)
    drawn = {"rbm_likelihood": likelihood_curve.draw(curve, result.numbers, share)}
    if result.pairs is None:
        return drawn
    ax = ebmpp.plots.plot_meeting_times(result.pairs)
    ax.axvline(
        args.sweeps + args.pair_lag, color=style.FAINT, linestyle="--", linewidth=1
    )
    title = "share of coupled pairs from training rows that have not met;"
    ax.set_title(
        f"{title}\ndashed: the lag and the {args.sweeps} sweeps of a draw", fontsize=9
    )
    return drawn | {"rbm_meeting_times": ax.figure}


def save(curve: list, result: Evaluation, args: argparse.Namespace) -> None:
    """Write all numbers as JSON."""
    options = (
        "data",
        "binarize",
        "latent",
        "num_pairs",
        "batch_size",
        "steps",
        "rate",
        "seed",
        "sweeps",
    )
    options += ("decay", "particles", "temperatures", "repeats")
    numbers = {"options": {name: getattr(args, name) for name in options}}
    numbers["held_out_rows"] = args.images.origin
    numbers |= {
        "estimator": repr(ebmpp.Centered(args.chosen)),
        "curve": curve,
        **result.numbers,
    }
    path = args.out / "rbm_likelihood.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"wrote {path}")


def report(result: Evaluation, args: argparse.Namespace) -> None:
    """Print the numbers."""
    numbers = result.numbers
    met = result.numbers["meeting"]
    common.print_row("likelihoods are of", args.images.origin)
    systems = numbers["particles"]
    common.print_row(
        "log-likelihood, particles",
        f"{systems['held_out']:.2f} +- {systems['standard_error']:.2f} held out, "
        f"{systems['train']:.2f} training rows ({systems['particles']} particles in "
        f"ten islands whose log Z spread by {systems['spread']:.2f}, "
        f"{systems['rungs']} temperatures of {systems['sweeps']} sweeps)",
    )
    for name, bias in (
        ("forward", "too large on average"),
        ("reverse", "too small, from exact draws"),
    ):
        mean = numbers[name]["pooled"]
        common.print_row(
            f"log-likelihood, {name}",
            f"{mean['held_out']:.2f} +- {mean['standard_error']:.2f} held out ({bias}; "
            f"{mean['effective']:.0f} of {args.particles * args.repeats} particles effective)",
        )
    bound = numbers["annealed"]
    common.print_row(
        "annealed distribution",
        f"at least {bound['held_out']:.2f} +- {bound['standard_error']:.2f} on average "
        f"({bound['rows']} rows)",
    )
    common.print_row("error of the rows", f"{numbers['row_error']:.2f}")
    others = f"{met['unmet']} not within {most_sweeps(args)}"
    if result.pairs is not None:
        others += f"; the others after {met['mean_after_lag']:.0f} on average, "
        others += f"at most {met['max_after_lag']:.0f}"
    common.print_row(
        "draws",
        f"{args.sweeps} sweeps from training rows; by then {met['later_than_sweeps']} "
        f"of {met['pairs']} coupled pairs had not met ({others}); distance to the "
        f"model's distribution at most {met['tv_bound']:.3g}",
    )
