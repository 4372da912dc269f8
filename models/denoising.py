# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bayesian denoising: an energy prior inside a NumPyro model that also infers the noise.

``python models/denoising.py --out demo/denoising`` adds Gaussian noise to handwritten
digits, and samples the posterior of the clean pixels and of the noise's scale, under an
Ising prior on a 16x16 lattice and under a restricted Boltzmann machine trained on other
digits. NUTS moves the scale and :class:`ebmpp.GibbsBlock` the pixels. It writes a
picture and an ArviZ file for each prior.
"""

import argparse
from collections.abc import Sequence
import dataclasses
from functools import partial
from typing import Any

import arviz_base
from matplotlib import pyplot as plt
import networkx as nx
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
import xarray as xr

import jax
from jax import Array
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, EnergyDistribution, FactorGraph, GibbsBlock
from ebmpp.ppl import Layout
from shared import common, digit_images

_NOISE = 0.6  # standard deviation; pixels are 0 and 1
_COUPLING = 0.6  # of neighbours in -1 and +1; strokes are long and two pixels wide


@dataclasses.dataclass(frozen=True)
class Prior:
    """Energy prior of images of ``layout.shape``."""

    name: str
    graph: FactorGraph
    params: dict[str, Array]
    layout: Layout

    def distribution(self) -> EnergyDistribution:
        """Return the prior as a distribution of images."""
        return EnergyDistribution(self.graph, self.params, layout=self.layout)

    def block(self) -> GibbsBlock:
        """Return the block of the pixels' posterior: each bias takes its share of the
        likelihood."""
        biases = {b: partial(posterior_bias, self, b) for b in self.layout.names}
        return GibbsBlock(self.graph, {"x": self.layout}, self.params | biases)


def posterior_bias(
    prior: Prior, block: str, sites: dict[str, Array], y: Array
) -> Array:
    """Return the prior's bias plus log N(y; 1, scale) - log N(y; 0, scale) of the
    block's pixels, per row."""
    return (
        prior.params[block] + (prior.layout.split(y)[block] - 0.5) / sites["scale"] ** 2
    )


def model(prior: Prior, y: Array) -> None:
    """Images ``y``: pixels of the prior in noise of one unknown scale."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("images", len(y)):
        x = numpyro.sample("x", prior.distribution())
        numpyro.sample("y", dist.Normal(x, scale).to_event(2), obs=y)


def ising(side: int = 16, coupling: float = _COUPLING) -> Prior:
    """Return an Ising prior on a lattice, whose two colours are the blocks."""
    lattice = nx.grid_2d_graph(side, side)
    even = np.indices((side, side)).sum(0) % 2 == 0
    half = side * side // 2
    graph = FactorGraph(
        {"even": Bernoulli(half), "odd": Bernoulli(half)},
        factors=[Bias("even"), Bias("odd"), Bilinear("even", "odd")],
    )
    layout = Layout.at(graph, (side, side), {"even": even, "odd": ~even})
    neighbours = nx.to_numpy_array(lattice, nodelist=sorted(lattice))
    weights = neighbours[np.ix_(even.ravel(), ~even.ravel())]
    # s = 2x - 1 turns coupling * s s' into these
    params = {
        "even": -2 * coupling * weights.sum(1),
        "odd": -2 * coupling * weights.sum(0),
        "even:odd": 4 * coupling * weights,
    }
    return Prior(
        "ising",
        graph,
        jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params),
        layout,
    )


def boltzmann(rows: np.ndarray, latent: int, steps: int, progress_bar: bool) -> Prior:
    """Return a restricted Boltzmann machine of 8x8 images, trained on ``rows``."""
    graph = FactorGraph(
        {"x": Bernoulli((8, 8))},
        {"h": Bernoulli(latent)},
        [Bias("x"), Bias("h"), Bilinear("x", "h")],
    )
    fit = ebmpp.fit(
        graph,
        rows.reshape(-1, 8, 8),
        estimator=ebmpp.PCD(k=5, num_chains=200),
        optimizer=optax.adam(optax.cosine_decay_schedule(0.02, steps, alpha=0.02)),
        num_steps=steps,
        batch_size=100,
        rng_key=jax.random.key(0),
        progress_bar=progress_bar,
    )
    return Prior("rbm", graph, fit.params, Layout.flat(graph, ["x"]))


def noisy(images: np.ndarray, seed: int) -> np.ndarray:
    """Add Gaussian noise."""
    return (
        images + np.random.default_rng(seed).normal(0, _NOISE, images.shape)
    ).astype(np.float32)


def posterior(prior: Prior, y: np.ndarray, args: argparse.Namespace) -> MCMC:
    """Sample the pixels and the scale."""
    block = prior.block()
    bound_model = partial(model, prior)
    block.verify(bound_model, jnp.asarray(y))  # the block is the model's posterior
    mcmc = MCMC(
        Gibbs([(block, ["x"]), (NUTS(bound_model), None)]),
        num_warmup=args.warmup,
        num_samples=args.samples,
        num_chains=args.chains,
        chain_method=jax.vmap,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(args.seed), jnp.asarray(y))
    return mcmc


# -- report --------------------------------------------------------------------------


def draws(mcmc: MCMC, truth: np.ndarray, y: np.ndarray) -> xr.DataTree:
    """Return the draws with the data and the true images, for ArviZ."""
    samples = {
        name: np.asarray(v) for name, v in mcmc.get_samples(group_by_chain=True).items()
    }
    dims = {"x": ["image", "row", "column"]}
    tree = arviz_base.from_dict({"posterior": samples}, dims=dims)
    data = {"y": (dims["x"], y), "truth": (dims["x"], truth)}
    tree["observed_data"] = xr.DataTree(xr.Dataset(data))
    return tree


def picture(tree: xr.DataTree) -> Any:
    """Draw true image, noisy image, posterior mean and posterior standard deviation,
    one row per image."""
    x = tree.posterior.x.astype(float)
    columns: dict[str, tuple[np.ndarray, tuple[float, float]]] = {
        "true": (tree.observed_data.truth.values, (0, 1)),
        "noisy": (tree.observed_data.y.values, (-1, 2)),
        "posterior mean": (x.mean(("chain", "draw")).values, (0, 1)),
        "posterior sd": (x.std(("chain", "draw")).values, (0, 0.5)),
    }
    count = len(tree.observed_data.truth)
    size = (1.7 * len(columns), 1.75 * count + 0.3)
    figure, axes = plt.subplots(
        count, len(columns), figsize=size, layout="constrained", squeeze=False
    )
    for column, (title, (images, (low, high))) in enumerate(columns.items()):
        axes[0, column].set_title(title, fontsize=10)
        for row in range(count):
            axes[row, column].imshow(images[row], cmap="gray_r", vmin=low, vmax=high)
            axes[row, column].set(xticks=[], yticks=[])
    return figure


def report(tree: xr.DataTree) -> str:
    """Describe errors of the posterior and of thresholding, and the scale's summary."""
    truth = tree.observed_data.truth.values
    y = tree.observed_data.y.values
    mean = tree.posterior.x.astype(float).mean(("chain", "draw")).values

    def wrong(guess):
        return f"{100 * np.mean((guess > 0.5) != truth):.1f} %"

    table = ebmpp.diagnostics.summary(tree, var_names=["scale"], round_to=2)
    return (
        f"pixels wrong: {wrong(y)} noisy, {wrong(mean)} by the posterior; true "
        f"scale {_NOISE}\n{table.to_string()}"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options."""
    parser = common.options(__doc__, "demo/denoising")
    add = parser.add_argument
    add("--prior", choices=("ising", "rbm", "both"), default="both")
    add("--images", type=int, default=4, help="number of images")
    add("--warmup", type=int, default=300)
    add("--samples", type=int, default=1000)
    add("--chains", type=int, default=4)
    add("--latent", type=int, default=64, help="latent units of the Boltzmann machine")
    add("--steps", type=int, default=3000, help="steps of its training")
    return common.parse(
        parser, argv, images=1, warmup=1, samples=1, chains=1, latent=1, steps=1
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Denoise under each prior."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = ebmpp.data.binarize(
        digit_images.shuffled("digits", np.random.default_rng(args.seed))
    )
    truth = rows[: args.images].reshape(-1, 8, 8)
    training = rows[args.images :]
    priors = []
    if args.prior != "rbm":
        priors.append((ising(), np.kron(truth, np.ones((2, 2)))))
    if args.prior != "ising":
        priors.append(
            (boltzmann(training, args.latent, args.steps, not args.no_progress), truth)
        )
    for prior, clean in priors:
        y = noisy(clean, args.seed)
        tree = draws(posterior(prior, y, args), clean, y)
        print(f"-- {prior.name} prior\n{report(tree)}")
        common.save(args.out / f"{prior.name}.nc", tree)
        common.save_figures(args.out, {prior.name: picture(tree)})


if __name__ == "__main__":
    main()
