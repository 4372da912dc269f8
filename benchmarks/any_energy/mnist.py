# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A convolutional residual on a Boltzmann machine of 784x500 units, better than the machine.

python benchmarks/any_energy/mnist.py [--machine machine.ebmpp] [--steps 10000]

The machine is the recipe's of ``models/rbm.py``; it is trained, and written to
``--machine``, where there is none. The energy of the image gets a small convolutional
network in addition, whose last layer starts at 0, and both are trained by persistent
chains. Pixels given latents are proposed from the machine's conditional and the
network's slope, and accepted or rejected.

The chains start at draws of the machine, by particle systems: chains that start at
noise or at images differ from it, and the network learns that difference first.

log Z of the new model less that of the machine is small. It is estimated from below by
annealing draws of the machine to the new model, and from above by annealing these back,
after sweeps of the new model. The gain per held-out image lies between both values, if
the sweeps suffice.
"""

import argparse
from collections.abc import Sequence
import json
import math
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple
import warnings

import numpy as np

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, Bias, Bilinear, Factor, FactorGraph
from ebmpp.core import random
from ebmpp.moves import Target
from ebmpp.moves.move import draw_sweep

sys.path[:0] = [str(Path(__file__).parents[2] / "models")]
from shared import digit_images, rbm_likelihood  # noqa: E402

CHANNELS = 32, 48
WIDTH = 96
CHAINS = 256
_AVERAGED = 0.2  # share of the steps whose params are averaged
_RUNGS = 20  # between the machine and the new model
_ROWS = 1000  # evaluated together

MACHINE = ebmpp.layered(v=Bernoulli(784), h=Bernoulli(500))


def patches(x: jax.Array, size: int) -> jax.Array:
    """Return all patches of ``size`` x ``size`` cells of an image ``(side, side, channels)``.

    Slices and matrix products: gradients of a strided convolution take ten times as
    long on two cores.
    """
    count = len(x) - size + 1
    slices = [x[i : i + count, j : j + count] for i in range(size) for j in range(size)]
    return jnp.concatenate(slices, -1)


def tiles(x: jax.Array) -> jax.Array:
    """Turn tiles of 2x2 cells into the channels of one cell."""
    side, _, channels = x.shape
    split = x.reshape(side // 2, 2, side // 2, 2, channels)
    return split.transpose(0, 2, 1, 3, 4).reshape(side // 2, side // 2, -1)


def residual(p: Any, v: jax.Array) -> jax.Array:
    """Convolutions of 6x6 pixels with stride 2 and of 2x2 cells, a dense layer, one output."""

    def layer(x, name):
        w, b = p[name]
        return jax.nn.swish(x @ w + b)

    x = layer(patches(tiles(v.reshape(28, 28, 1)), 3), "first")
    x = layer(tiles(x), "second")
    return layer(x.ravel(), "dense") @ p["last"]


def init(key: jax.Array) -> Any:
    """Weights of unit gain, and a last layer of zeros: the machine itself."""
    a, b = CHANNELS
    shapes = {"first": (36, a), "second": (4 * a, b), "dense": (36 * b, WIDTH)}
    params: dict[str, Any] = {}
    for (name, shape), k in zip(shapes.items(), jax.random.split(key, 3)):
        w = jax.random.normal(k, shape) / math.sqrt(shape[0])
        params[name] = w, jnp.zeros(shape[1])
    return params | {"last": jnp.zeros(WIDTH)}


NET = Factor("v", energy=residual, init=init, name="net", affine=False)
GRAPH = FactorGraph(
    {"v": Bernoulli(784)},
    {"h": Bernoulli(500)},
    [Bias("v"), Bias("h"), Bilinear("v", "h"), NET],
)

#: All pixels redrawn at once, accepted or rejected, and the latents.
MOVES = ebmpp.moves.informed_sweep(GRAPH, rule="heat_bath", step_size=1.0, num_steps=1)


# -- training ------------------------------------------------------------------------


def machine(args: argparse.Namespace, data: digit_images.Rows) -> Any:
    """Return the recipe's params, from the file or by training."""
    if args.machine.exists():
        return ebmpp.load(args.machine)[1]
    options = rbm_likelihood.DEFAULTS
    size = options["batch_size"]
    fit = ebmpp.fit(
        MACHINE,
        digit_images.batches(data.grey, size, args.seed, data.shape),
        estimator=ebmpp.Centered(PCD(num_chains=options["num_pairs"])),
        optimizer=rbm_likelihood.optimizer(options["rate"], args.machine_steps),
        num_steps=args.machine_steps,
        batch_size=size,
        rng_key=jax.random.key(args.seed),
    )
    params = ebmpp.optimizers.averaged_params(fit.optimizer_state)
    args.machine.parent.mkdir(parents=True, exist_ok=True)
    ebmpp.save(args.machine, MACHINE, params)
    return params


def optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Return Adam for the network, and momentum at a small rate for the machine."""

    def rates(rate):
        return optax.linear_schedule(rate, 0.0, args.steps)

    net = optax.chain(
        optax.scale_by_adam(b1=0.5),
        optax.add_decayed_weights(args.decay),
        optax.scale_by_learning_rate(rates(args.rate)),
    )
    rest = optax.chain(
        optax.add_decayed_weights(rbm_likelihood.DECAY),
        optax.sgd(rates(args.machine_rate), momentum=0.5),
    )
    labels = {name: "net" if name == "net" else "rest" for name in GRAPH.param_shapes}
    both = optax.partition({"net": net, "rest": rest}, labels)
    first = math.floor((1 - _AVERAGED) * args.steps)
    return ebmpp.optimizers.averaged(both, from_step=first)


class StartedPCD(PCD):
    """Persistent chains that start at given states."""

    start: Any = None

    def init_state(self, graph: Any, params: Any, *rest: Any) -> Any:
        """Return the given states."""
        return type(self).start


def trained(
    args: argparse.Namespace, data: digit_images.Rows, start: Any, draws: Any
) -> Any:
    """Return the averaged params, and the acceptance of the last steps.

    :param draws: draws of the machine.
    """
    StartedPCD.start = {b: v[:CHAINS] for b, v in draws.items()}
    fit = ebmpp.fit(
        GRAPH,
        digit_images.batches(data.grey, CHAINS, args.seed + 1, data.shape),
        estimator=StartedPCD(num_chains=CHAINS, moves=MOVES),
        params=start,
        optimizer=optimizer(args),
        num_steps=args.steps,
        batch_size=CHAINS,
        rng_key=jax.random.key(args.seed + 1),
    )
    acceptance = float(fit.history.acceptance[-args.steps // 10 :].mean())
    return ebmpp.optimizers.averaged_params(fit.optimizer_state), acceptance


# -- the difference of log Z ---------------------------------------------------------


class Difference(NamedTuple):
    """An estimate of log Z less that of the machine, by annealing.

    :param spread: standard deviation of the log-weights.
    """

    value: float
    standard_error: float
    spread: float
    effective: float


def between(start: Any, end: Any, share: float) -> Any:
    """Return params on the line from the machine, with the network's energy scaled."""
    at = jax.tree.map(lambda a, b: (1 - share) * a + share * b, start, end)
    return at | {"net": end["net"] | {"last": share * end["net"]["last"]}}


@jax.jit
def sweeps(params: Any, x: Any, keys: jax.Array, count: int) -> Any:
    """Move rows by some sweeps of a model."""
    target = Target(GRAPH, params)

    def body(i, x):
        return draw_sweep(target, x, MOVES, random.fold_in(keys, i))[0]

    return jax.lax.fori_loop(0, count, body, x)


def keys_of(count: int, *numbers: int) -> jax.Array:
    """Return one key per row."""
    key = random.key_pair(jax.random.key(0))
    for number in numbers:
        key = random.fold_in(key, number)
    return random.fold_in(key, np.arange(count))


free_energy = jax.jit(lambda params, v: GRAPH.free_energy(params, {"v": v}))


class Annealed(NamedTuple):
    """Rows at one of both models, and their log-weights."""

    x: Any
    log_weights: np.ndarray

    def difference(self, sign: int) -> Difference:
        """Return the estimate of log Z less that of the machine, or with -1 of its negative."""
        top = self.log_weights.max()
        w = np.exp(self.log_weights - top)
        count = len(w)
        value = sign * (math.log(w.mean()) + top)
        error = w.std(ddof=1) / w.mean() / math.sqrt(count)
        effective = w.sum() ** 2 / (w**2).sum() / count
        return Difference(value, error, self.log_weights.std(), effective)

    def resampled(self, seed: int) -> Any:
        """Return rows of equal weight."""
        w = np.exp(self.log_weights - self.log_weights.max())
        rng = np.random.default_rng(seed)
        index = rng.choice(len(w), len(w), p=w / w.sum())
        return {b: v[index] for b, v in self.x.items()}


def annealed(start: Any, end: Any, x: Any, is_upward: bool, seed: int) -> Annealed:
    """Anneal rows from the machine to the new model, or back."""
    shares = np.linspace(0, 1, _RUNGS + 1)
    if not is_upward:
        shares = shares[::-1]
    count = len(x["v"])
    total = np.zeros(count)
    for rung, (low, high) in enumerate(zip(shares, shares[1:])):
        before = free_energy(between(start, end, low), x["v"])
        after = between(start, end, high)
        total += np.asarray(before - free_energy(after, x["v"]), float)
        x = sweeps(after, x, keys_of(count, seed, rung), 1)
    return Annealed(x, total)


def draws_of_machine(args: argparse.Namespace, data: Any, params: Any) -> tuple:
    """Return rows of draws by particle systems, and their estimate of log Z."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heavy tails: the error is reported
        system = ebmpp.smc(
            MACHINE,
            params,
            rng_key=jax.random.key(args.seed + 2),
            num_particles=args.particles,
            num_sweeps=20,
            cess_threshold=0.98,
            data=data.train,
        )
    w = np.asarray(system.weights, float)
    rng = np.random.default_rng(args.seed)
    index = rng.choice(len(w), len(w), p=w / w.sum())
    return {b: jnp.asarray(v)[index] for b, v in system.particles.items()}, system


def mean_free_energy(params: Any, rows: np.ndarray) -> float:
    """Return the mean free energy of rows."""
    parts = [
        np.asarray(free_energy(params, rows[i : i + _ROWS].astype(np.float32)), float)
        for i in range(0, len(rows), _ROWS)
    ]
    return float(np.concatenate(parts).mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Train, bracket the gain and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--machine", type=Path, default=Path("runs/machine.ebmpp"))
    add("--machine-steps", type=int, default=40_000)
    add("--data-dir", help="where MNIST is; default: EBMPP_DATA_DIR")
    add("--steps", type=int, default=2_200)
    add("--rate", type=float, default=1e-3, help="of Adam, for the network")
    add("--machine-rate", type=float, default=0.001)
    add("--decay", type=float, default=1e-2, help="of the network, times the rate")
    add("--particles", type=int, default=2000)
    add("--sweeps", type=int, default=100, help="of the new model, before the way back")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    data = digit_images.read("mnist", args.data_dir, "bernoulli", 0)
    clocks = [(time.time(), time.process_time())]

    def clock(stage: str) -> None:
        clocks.append((time.time(), time.process_time()))
        wall, cpu = (b - a for a, b in zip(*clocks[-2:]))
        print(f"{stage}: {wall:.0f} s, {cpu:.0f} CPU-seconds", flush=True)

    rbm = machine(args, data)
    clock("machine")
    net = init(jax.random.key(args.seed))
    start = {**rbm, "net": net}
    draws, system = draws_of_machine(args, data, rbm)
    clock("draws of the machine")
    end, acceptance = trained(args, data, start, draws)
    clock("training")
    forward = annealed(start, end, draws, True, args.seed)
    x = forward.resampled(args.seed)
    x = sweeps(end, x, keys_of(len(x["v"]), args.seed, _RUNGS), args.sweeps)
    up = forward.difference(1)
    down = annealed(start, end, x, False, args.seed + 1).difference(-1)
    clock("log Z")
    rows = {"held_out": data.held_out, "train": data.train[: len(data.held_out)]}
    still = between(start, end, 0.0)
    result: dict[str, Any] = {"acceptance": acceptance}
    for part, v in rows.items():
        fall = mean_free_energy(still, v) - mean_free_energy(end, v)
        likelihood = float(system.average_log_likelihood(v).value)
        result[part] = {
            "machine": likelihood,
            "gain": [fall - side.value for side in (up, down)],
        }
    result["machine_error"] = float(system.standard_error)
    result["log_z"] = {
        "from the machine": up._asdict(),
        "from the model": down._asdict(),
    }
    result["seconds"] = clocks[-1][0] - clocks[0][0]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
