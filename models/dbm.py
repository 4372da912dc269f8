# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A deep Boltzmann machine on handwritten digits, trained end to end, without pretraining.

``python models/dbm.py --out dbm`` trains on the digits that come with scikit-learn; ``--data mnist --sides
500 500`` is the size of the literature, and ``--sides 100 100 100`` a machine one layer deeper. Three
estimators: ``lmi`` (pairs from local modes, the default), ``ucd`` (coupled Gibbs chains, started at
persistent ones) and ``pcd`` (persistent chains, mean-field posterior: the classical baseline). Writes
samples, completions of half images, the course of training, and an ArviZ file. ``--grey`` encodes pixels as
eight binary digits each instead of two levels.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import time
from typing import Any, NamedTuple

import numpy as np

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, UCD, FactorGraph, LocalModeUCD, MeanField, Observed, Spin
from ebmpp.errors import DivergenceError

_DEEPEST = 4
_SHOWN, _COLUMNS = 40, 10
_HELD_OUT = _COLUMNS * 2  # images that are completed


class Images(NamedTuple):
    """Images as rows of -1 and 1, and how to show one."""

    train: np.ndarray
    held_out: np.ndarray
    shape: tuple[int, int]
    grey: bool

    def intensities(self, v: Any) -> np.ndarray:
        """Rows of means or states as images in [0, 1]."""
        v = np.asarray(v)
        if not self.grey:
            return (v + 1) / 2
        return ebmpp.data.decode_bits(v.reshape(len(v), -1, 8), spin=True)


# -- options and data ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=("digits", "mnist"), default="digits", help="mnist is read from EBMPP_DATA_DIR")
    add("--grey", action="store_true", help="eight binary digits a pixel")
    add("--sides", type=int, nargs="+", default=(100, 100), help=f"units of one to {_DEEPEST} latent layers")
    add("--estimator", choices=("lmi", "ucd", "pcd"), default="lmi")
    add("--num-pairs", type=int, default=100, help="coupled pairs, or persistent chains")
    add("--cost", type=float, default=100.0, help="sweeps a pair that ucd spends on average")
    add("--steps", type=int, default=4000)
    add("--batch-size", type=int, default=100)
    add("--rate", type=float, default=0.004, help="first learning rate; it decays along a cosine")
    add("--seed", type=int, default=0)
    add("--checkpoint-dir", help="keep checkpoints there, and go on from them")
    add("--out", type=Path, default=Path("dbm"), help="folder for pictures and files")
    add("--no-progress", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    for name in ("num_pairs", "steps", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, not {getattr(args, name)}")
    if len(args.sides) > _DEEPEST or min(args.sides) < 1:
        parser.error(f"--sides are one to {_DEEPEST} numbers of at least 1, not {list(args.sides)}")
    if not (args.rate > 0 and args.cost > 1):
        parser.error("--rate is positive and --cost above 1")
    try:
        args.images = images(args.data, args.grey, args.seed)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def images(name: str, grey: bool, seed: int) -> Images:
    """Digits as spins, some held out."""
    rows = ebmpp.data.digits() if name == "digits" else ebmpp.data.mnist()
    shape = (8, 8) if name == "digits" else (28, 28)
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    spins = 2 * ebmpp.data.binarize(rows) - 1
    if grey:
        spins = ebmpp.data.encode_bits(rows, spin=True).reshape(len(rows), -1)
    return Images(spins[_HELD_OUT:], spins[:_HELD_OUT], shape, grey)


# -- the model and its training ------------------------------------------------------------------


def declare(visible: int, sides: Sequence[int]) -> FactorGraph:
    """Layers of spins: with -1 and 1 every gradient counts, whichever value a unit has."""
    return ebmpp.layered(v=Spin(visible), **{f"h{i}": Spin(side) for i, side in enumerate(sides, 1)})


def estimator(args: argparse.Namespace) -> LocalModeUCD | UCD | PCD:
    """The estimator that the options name."""
    if args.estimator == "lmi":
        return LocalModeUCD(num_pairs=args.num_pairs)
    if args.estimator == "pcd":
        return PCD(num_chains=args.num_pairs, posterior=MeanField(10))
    return UCD(num_pairs=args.num_pairs, start="persistent", target_cost=args.cost, marginalize="layers")


def train(dbm: FactorGraph, args: argparse.Namespace) -> ebmpp.Fit:
    """Plain gradient steps at a decaying rate."""
    return ebmpp.fit(
        dbm,
        args.images.train,
        estimator=estimator(args),
        optimizer=optax.sgd(optax.cosine_decay_schedule(args.rate, args.steps, alpha=0.04)),
        num_steps=args.steps,
        batch_size=args.batch_size,
        scheme="orthogonal" if args.estimator == "lmi" else "gaussian",
        rng_key=jax.random.key(args.seed),
        checkpoint_dir=args.checkpoint_dir,
        resume=args.checkpoint_dir is not None,
        progress_bar=not args.no_progress,
    )


# -- what comes of it ----------------------------------------------------------------------------


def sample(dbm: FactorGraph, params: Any, seed: int, sweeps: int) -> dict[str, jax.Array]:
    """States some sweeps away from local modes that are searched from noise."""
    key = jax.random.key(seed + 1)
    modes = ebmpp.local_search(dbm, params, rng_key=key, init=_noise(dbm, seed)).state
    if not sweeps:
        return modes
    from numpyro.infer import MCMC

    mcmc = MCMC(
        ebmpp.BlockedGibbs(dbm),
        num_warmup=sweeps - 1,
        num_samples=1,
        num_chains=_SHOWN,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(key, params, init_params=modes)
    return {b: v[:, 0] for b, v in mcmc.get_samples(group_by_chain=True).items()}


def _noise(dbm: FactorGraph, seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(dbm.families))
    return {
        b: 2.0 * jax.random.bernoulli(k, shape=(_SHOWN, *f.shape)) - 1
        for k, (b, f) in zip(keys, dbm.families.items(), strict=True)
    }


def complete(dbm: FactorGraph, params: Any, data: Images, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Upper halves of held-out images, and those completed by local search."""
    width = data.held_out.shape[1]
    known = jnp.arange(width) < width // 2
    halves = jnp.where(known, data.held_out, -1.0)
    made = ebmpp.local_search(
        dbm, params, rng_key=jax.random.key(seed + 2), v=Observed(jnp.asarray(data.held_out), known)
    )
    mean = dbm.mean(params, made.state, "v")
    return data.intensities(halves), data.intensities(jnp.where(known, data.held_out, mean))


def draw(dbm: FactorGraph, fit: ebmpp.Fit, args: argparse.Namespace) -> list[Path]:
    """The three pictures."""
    import matplotlib

    matplotlib.use("agg")
    figures = {"samples": _samples, "completions": _completions, "history": _history}
    written = []
    for name, make in figures.items():
        figure = make(dbm, fit, args)
        written.append(args.out / f"{name}.png")
        figure.savefig(written[-1], dpi=130, bbox_inches="tight")
        matplotlib.pyplot.close(figure)
    return written


def _samples(dbm: FactorGraph, fit: ebmpp.Fit, args: argparse.Namespace) -> Any:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.2), layout="constrained")
    shown = {"real images": args.images.intensities(args.images.train[:_SHOWN])}
    for sweeps, name in ((0, "local modes, found from noise"), (100, "and 100 Gibbs sweeps on")):
        state = sample(dbm, fit.params, args.seed, sweeps)
        shown[name] = args.images.intensities(dbm.mean(fit.params, state, "v"))
    for ax, (name, rows) in zip(axes, shown.items(), strict=True):
        ebmpp.plots.plot_units(rows, args.images.shape, ncols=_COLUMNS, ax=ax)
        ax.set_title(name, fontsize=10)
    return figure


def _completions(dbm: FactorGraph, fit: ebmpp.Fit, args: argparse.Namespace) -> Any:
    from matplotlib import pyplot as plt

    halves, whole = complete(dbm, fit.params, args.images, args.seed)
    truth = args.images.intensities(args.images.held_out)
    figure, axes = plt.subplots(3, 1, figsize=(7, 5), layout="constrained")
    for ax, rows, title in zip(axes, (truth, halves, whole), ("held out", "given", "completed"), strict=True):
        ebmpp.plots.plot_units(rows, args.images.shape, ncols=_COLUMNS, ax=ax)
        ax.set_title(title, fontsize=10)
    return figure


def _history(dbm: FactorGraph, fit: ebmpp.Fit, args: argparse.Namespace) -> Any:
    from matplotlib import pyplot as plt

    wanted = ("gradient_norm", "meeting_time_mean", "lag", "corrected", "acceptance")
    names = [n for n in wanted if n in fit.history]
    size = (3.6 * len(names), 3)
    figure, axes = plt.subplots(1, len(names), figsize=size, layout="constrained", squeeze=False)
    ebmpp.plots.plot_history(fit.history[names], axes=list(axes[0]))
    return figure


def report(fit: ebmpp.Fit, args: argparse.Namespace, seconds: float) -> str:
    """The numbers, a line each."""
    last = fit.history.isel(step=slice(-100, None)).mean()
    lines = {"images": f"{len(args.images.train)} of {args.images.train.shape[1]} units"}
    lines["training"] = f"{args.steps} steps of {estimator(args)!r} in {seconds:.0f} s"
    for phase, name in (("", "model"), ("posterior_", "posterior")):
        value = {n.removeprefix(phase): float(last[n]) for n in last if n.startswith(phase)}
        if "meeting_time_mean" in value:
            told = f"mean {value['meeting_time_mean']:.1f}, lag {value['lag']:.0f}, "
            told += f"corrected {value['corrected']:.3g} of the pairs"
            if "acceptance" in value:
                told += f", accepted {value['acceptance']:.3g} of the proposals"
            lines[f"meeting times, {name}"] = told
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Train, draw, save."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    dbm = declare(args.images.train.shape[1], args.sides)
    print(f"{dbm!r}\nlayers {dbm.layers}")
    begin = time.monotonic()
    try:
        fit = train(dbm, args)
    except DivergenceError as error:
        raise SystemExit(str(error)) from error
    jax.block_until_ready(fit.params)
    seconds = time.monotonic() - begin
    written = draw(dbm, fit, args)
    written.append(args.out / "history.nc")
    ebmpp.to_datatree(fit).to_netcdf(written[-1], engine="h5netcdf")
    print(report(fit, args, seconds))
    print("\n".join(f"wrote {path}" for path in written))


if __name__ == "__main__":
    main()
