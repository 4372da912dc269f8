# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The recipe ``likelihood`` of rbm.py: a machine too large to sum, and its log-likelihood from both sides.

Training is PCD with centered gradients: batches of 384 rows and 384 chains, momentum 0.5, a rate that falls
linearly from 0.2 to 0, a weight decay of 1.5e-4, and the mean of the last tenth of the iterates, which is the
model. With ``--binarize bernoulli`` a row is drawn anew each time it is seen, and one in ten is moved by a
pixel, which so far has not been shown to help beyond the error of log Z.

Along the run and in the end log Z comes from particle systems, with the error of ten islands:

* ``particles``: the log-likelihood is too large on average, by about half the squared error.

It is also annealed from independent units to the model and back, and there are three more numbers:

* ``forward``: the log-likelihood is too large on average. A theorem.
* ``reverse``: it is too small on average, from exact draws of the model. There are none of a model of this
  size: the runs start from chains of ``sweeps`` sweeps from training rows, and coupled pairs from the same
  starts say how far from the model's law these may be. Evidence, and no bound.
* ``annealed``: of held-out rows under the law of the last state of the forward run, which is a sampler.
  Annealing back from these rows bounds it from below on average, whatever the model's chains do. A theorem,
  but of a law that is the model's only in the limit of many temperatures.

**References**

1. Salakhutdinov, Murray (2008), *On the quantitative analysis of deep belief networks*.
2. Melchior, Fischer, Wiskott (2016), *How to center deep Boltzmann machines*.
3. Grosse, Ghahramani, Adams (2015), *Sandwiching the marginal likelihood using bidirectional Monte Carlo*.
4. Burda, Grosse, Salakhutdinov (2015), *Accurate and conservative estimates of MRF log-likelihood using
   reverse annealing*.
"""

import argparse
from collections.abc import Callable
import json
import math
from pathlib import Path
import time
from typing import Any, NamedTuple
import warnings

from matplotlib import pyplot as plt
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
DECAY, _MOMENTUM, _AVERAGED = 1.5e-4, 0.5, 0.1
_POINTS = 10  # of the learning curve
_ROWS = 10_000  # training rows at most whose likelihood is told
_A_PARTICLE = 10  # of particle systems, for one of annealing
# Sweeps at each rung, along the run and in the end. With one sweep, ten times as many particles said 0.8 nats
# more of a 784x500 machine, with an error of 0.2: its modes are reached by sweeps, not by particles.
_SOME, _MANY = 4, 20
_EVENNESS = 0.98
_LADDER = "sigmoid"  # of the final estimates
_MOST_SWEEPS = 2  # times the sweeps of a chain: how long pairs are watched


# -- training --------------------------------------------------------------------------------------


def optimizer(
    rate: float, steps: int, warm: float = 0.0, decay: float = DECAY
) -> optax.GradientTransformation:
    """Momentum under a linearly falling rate, decaying weights, and the mean of the last iterates.

    :param warm: share of the steps in which the rate rises from a fifth.
    :param decay: of weights.
    """
    weights = lambda params: {name: ":" in name for name in params}
    rising = math.floor(warm * steps)
    falling = optax.linear_schedule(rate, 0.0, steps - rising)
    rates = optax.join_schedules([optax.linear_schedule(rate / 5, rate, rising), falling], [rising])
    steepest = optax.sgd(rates if rising else falling, momentum=_MOMENTUM)
    decayed = optax.chain(optax.add_decayed_weights(decay, weights), steepest)
    return ebmpp.optimizers.averaged(decayed, start=math.floor((1 - _AVERAGED) * steps))


class Curve:
    """Estimates along a run, in a file: a resumed run goes on with it.

    :param path: of the file.
    :param estimate: from params to numbers.
    """

    def __init__(self, path: Path, estimate: Callable[[Any], dict[str, float]], resume: bool) -> None:
        self.path, self._estimate = path, estimate
        self.points = json.loads(path.read_text()) if resume and path.exists() else []
        self._begin = time.monotonic() - (self.points[-1]["seconds"] if self.points else 0)

    def __call__(self, progress: Any) -> None:
        """A point more, unless it is there; those that a stopped run had later are dropped."""
        self.points = [p for p in self.points if p["step"] <= progress.step]
        if not self.points or self.points[-1]["step"] < progress.step:
            now = {"step": progress.step, "seconds": round(time.monotonic() - self._begin, 1)}
            self.points.append(now | self._estimate(progress.params))
        self.path.write_text(json.dumps(self.points, indent=1))


def train(rbm: FactorGraph, args: argparse.Namespace) -> tuple[Any, list[dict[str, float]]]:
    """The model, and the learning curve."""
    data, size = args.images, min(args.batch_size, len(args.images.train))
    curve = Curve(args.out / "curve.json", lambda params: _roughly(rbm, params, args), args.resume)
    fit = common.train(
        rbm,
        data.train if data.grey is None else digit_images.batches(data.grey, size, args.seed, data.shape),
        args,
        ebmpp.estimators.Centered(args.chosen),
        optimizer=optimizer(args.rate, args.steps, decay=args.decay),
        batch_size=size,
        callbacks=[curve],
        monitor_every=max(1, args.steps // _POINTS),
        checkpoint_dir=args.out / "checkpoints",
        checkpoint_every=max(1, args.steps // _POINTS),
        resume=args.resume,
    )
    return ebmpp.optimizers.averaged_params(fit.optimizer_state), curve.points


def _roughly(rbm: FactorGraph, params: Any, args: argparse.Namespace) -> dict[str, float]:
    """The likelihoods by particle systems, with the error of log Z that both share."""
    made = systems(rbm, params, args, args.seed + 3, _SOME)
    parts = {"held_out": args.images.held_out, "train": args.images.train[:_ROWS]}
    told = {part: made.average_log_likelihood(rows).value for part, rows in parts.items()}
    return told | {"standard_error": made.standard_error, "effective": made.effective_sample_size}


def systems(rbm: FactorGraph, params: Any, args: argparse.Namespace, seed: int, sweeps: int) -> Any:
    """log Z by particle systems from the training rows' base rates, with the error of ten islands."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the effective size is told
        return ebmpp.smc(
            rbm,
            params,
            rng_key=jax.random.key(seed),
            num_particles=_A_PARTICLE * args.particles,
            num_sweeps=sweeps,
            evenness=_EVENNESS,
            data=args.images.train,
        )


# -- evaluation ------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """What was measured of a model."""

    brackets: list[ebmpp.annealing.log_partition.Bracket]
    pairs: Any
    """Coupled pairs from training rows; None where none of them met."""
    numbers: dict[str, Any]


def starts(rbm: FactorGraph, params: Any, rows: np.ndarray, count: int, seed: int) -> dict[str, np.ndarray]:
    """Latents given training rows drawn at random, with which a sweep begins: it draws the pixels first."""
    generator = np.random.default_rng(seed)
    chosen = rows[generator.integers(len(rows), size=count)]
    means = np.asarray(rbm.mean(params, {"v": chosen}, "h"))
    return {"h": (generator.random(means.shape, np.float32) < means).astype(np.float32)}


def chains(rbm: FactorGraph, params: Any, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """States of independent chains after ``sweeps`` sweeps from training rows."""
    begin = starts(rbm, params, args.images.train, args.particles, seed)
    kernel = ebmpp.BlockedGibbs(rbm)
    run = common.chains(kernel, params, seed, warmup=args.sweeps - 1, count=args.particles, init=begin)
    return run.get_samples()


def watched(args: argparse.Namespace) -> int:
    """How many sweeps a pair is watched at most: longer than its lag, or it could not meet."""
    return max(_MOST_SWEEPS * args.sweeps, args.pair_lag + 1)


def pairs(rbm: FactorGraph, params: Any, args: argparse.Namespace) -> Any:
    """Coupled pairs whose chains begin as those of :func:`chains` do; None where none of them met."""
    try:
        return ebmpp.unbiased_expectation(
            rbm,
            params,
            lambda x: x["v"].sum(),
            rng_key=jax.random.key(args.seed + 4),
            num_pairs=args.coupled,
            lag=args.pair_lag,
            init=starts(rbm, params, args.images.train, args.coupled, args.seed + 4),
            max_sweeps=watched(args),
            unmet="drop",
        )
    except UnmetError:  # there is no mean to be had, but the trained model is to be told of all the same
        return None


def annealed(rbm: FactorGraph, params: Any, args: argparse.Namespace, seed: int) -> np.ndarray:
    """Annealing back from some held-out rows: what each adds to minus its free energy.

    The sum is on average at most the row's log-likelihood under the law of the last state of forward
    annealing, as its exponential is that likelihood on average.
    """
    rows = args.images.held_out
    chosen = np.random.default_rng(seed).choice(len(rows), min(args.particles, len(rows)), replace=False)
    made = ebmpp.annealing.reverse_ais(
        rbm,
        params,
        rng_key=jax.random.key(seed + 1000),
        samples={"v": rows[chosen]},
        num_temperatures=args.temperatures,
        ladder=_LADDER,
        data=args.images.train,
    )
    return made.log_weights


def evaluate(rbm: FactorGraph, params: Any, args: argparse.Namespace) -> Evaluation:
    """Brackets of log Z from independent seeds, and how good the draws are that they start from."""
    brackets, increments = [], []
    for seed in range(args.seed + 100, args.seed + 100 + args.repeats):
        made = ebmpp.bracket(
            rbm,
            params,
            rng_key=jax.random.key(seed),
            samples=chains(rbm, params, args, seed),
            num_temperatures=args.temperatures,
            ladder=_LADDER,
            data=args.images.train,
        )
        brackets.append(made)
        increments.append(annealed(rbm, params, args, seed))
        print(f"{made}, annealed {increments[-1].mean():.2f}", flush=True)
    coupled = pairs(rbm, params, args)
    numbers = _numbers(brackets, coupled, args)
    numbers["particles"] = _by_particles(rbm, params, args)
    energy = float(np.mean(rbm.free_energy(params, {"v": args.images.held_out})))
    added = np.concatenate(increments)
    numbers["annealed"] = {
        "held_out": added.mean() - energy,
        "standard_error": added.std(ddof=1) / math.sqrt(added.size),
        "spread": added.std(ddof=1),
        "rows": added.size,
    }
    return Evaluation(brackets, coupled, numbers)


def _by_particles(rbm: FactorGraph, params: Any, args: argparse.Namespace) -> dict[str, float]:
    """The likelihoods of both parts by particles of many sweeps."""
    made = systems(rbm, params, args, args.seed + 5, _MANY)
    rows = {"held_out": args.images.held_out, "train": args.images.train[:_ROWS]}
    told = {part: made.average_log_likelihood(r).value for part, r in rows.items()}
    told |= {"log_partition": made.log_partition, "standard_error": made.standard_error}
    told |= {"particles": len(made.weights), "rungs": made.num_rungs, "sweeps": _MANY}
    return told | {"spread": float(made.log_z.std(ddof=1)), "distinct_ancestors": made.distinct_ancestors}


def _numbers(brackets: list, coupled: Any, args: argparse.Namespace) -> dict[str, Any]:
    rows = {"held_out": args.images.held_out, "train": args.images.train[:_ROWS]}
    told: dict[str, Any] = {}
    for side in ("lower", "upper"):
        each = [getattr(b, side) for b in brackets]
        name = {"lower": "forward", "upper": "reverse"}[side]  # a lower log Z is a larger likelihood
        told[name] = {part: [e.average_log_likelihood(r).value for e in each] for part, r in rows.items()}
        told[name]["log_partition"] = [e.log_partition for e in each]
        told[name]["standard_error"] = [e.standard_error for e in each]
        told[name]["effective"] = [e.effective_sample_size for e in each]
        # all weights of all seeds are one sample of weights
        told[name]["pooled"] = _pooled(each, rows["held_out"])
    told["row_error"] = brackets[0].lower.average_log_likelihood(rows["held_out"]).row_error
    told["meeting"] = _met(coupled, args)
    return told


def _met(coupled: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What the pairs tell; of none that met, that their distance may be as large as any: 1."""
    if coupled is None:
        count = args.coupled
        told = {"pairs": count, "lag": args.pair_lag, "unmet": count, "later_than_sweeps": count}
        return told | {"tv_bound": 1.0, "tv_bound_upper": 1.0}
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


def _pooled(each: list, rows: np.ndarray) -> dict[str, float]:
    """The mean log-likelihood at the log of the mean of all seeds' weights, and its standard error."""
    log_weights = np.concatenate([e.log_weights for e in each])
    sign = 1 if each[0].bound == "lower" else -1
    top = log_weights.max()
    w = np.exp(log_weights - top)
    log_mean = math.log(w.mean()) + top
    # log_partition is sign * (log mean weight) for every seed; rows enter by their free energies alone
    value = each[0].average_log_likelihood(rows).value + each[0].log_partition - sign * log_mean
    error = w.std(ddof=1) / w.mean() / math.sqrt(len(w))
    return {"held_out": value, "standard_error": error, "effective": w.sum() ** 2 / (w**2).sum()}


# -- what is written -------------------------------------------------------------------------------


def draw(curve: list[dict[str, float]], made: Evaluation, args: argparse.Namespace) -> Any:
    """The learning curve with the final bounds, and the meeting times."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    likelihood_curve.draw(left, curve, made.numbers, args.batch_size / len(args.images.train))
    if made.pairs is None:
        right.text(0.5, 0.5, "none of the pairs met", ha="center", transform=right.transAxes)
    else:
        ebmpp.plots.plot_meeting_times(made.pairs, ax=right)
    right.axvline(args.sweeps + args.pair_lag, color=style.FAINT, linestyle="--", linewidth=1)
    told = "share of coupled pairs from training rows that have not met;"
    right.set_title(f"{told}\ndashed: the lag and {args.sweeps} sweeps, of which draws are", fontsize=9)
    return figure


def save(curve: list, made: Evaluation, args: argparse.Namespace) -> None:
    """Everything as JSON."""
    options = ("data", "binarize", "latent", "num_pairs", "batch_size", "steps", "rate", "seed", "sweeps")
    options += ("decay", "particles", "temperatures", "repeats")
    told = {"options": {name: getattr(args, name) for name in options}}
    told["held_out_rows"] = args.images.origin
    told |= {"estimator": repr(ebmpp.estimators.Centered(args.chosen)), "curve": curve, **made.numbers}
    path = args.out / "rbm_likelihood.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(f"wrote {path}")


def report(made: Evaluation, args: argparse.Namespace) -> None:
    """The numbers, a line each."""
    numbers, met = made.numbers, made.numbers["meeting"]
    common.tell("likelihoods are of", args.images.origin)
    own = numbers["particles"]
    common.tell(
        "log-likelihood, particles",
        f"{own['held_out']:.2f} +- {own['standard_error']:.2f} held out, {own['train']:.2f} training rows "
        f"({own['particles']} particles in ten islands whose log Z spread by {own['spread']:.2f}, "
        f"{own['rungs']} rungs of {own['sweeps']} sweeps)",
    )
    for name, told in (("forward", "too large on average"), ("reverse", "too small, from exact draws")):
        mean = numbers[name]["pooled"]
        common.tell(
            f"log-likelihood, {name}",
            f"{mean['held_out']:.2f} +- {mean['standard_error']:.2f} held out ({told}; "
            f"{mean['effective']:.0f} of {args.particles * args.repeats} particles effective)",
        )
    own = numbers["annealed"]
    common.tell(
        "of the annealed law",
        f"at least {own['held_out']:.2f} +- {own['standard_error']:.2f} on average ({own['rows']} rows)",
    )
    common.tell("error of the rows", f"{numbers['row_error']:.2f}")
    others = f"{met['unmet']} not within {watched(args)}"
    if made.pairs is not None:
        others += f"; the others after {met['mean_after_lag']:.0f} on average, "
        others += f"at most {met['max_after_lag']:.0f}"
    common.tell(
        "draws",
        f"{args.sweeps} sweeps from training rows; by then {met['later_than_sweeps']} of {met['pairs']} "
        f"coupled pairs had not met ({others}); distance to the model's law at most {met['tv_bound']:.3g}",
    )
