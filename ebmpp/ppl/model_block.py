# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A block of Gibbs that follows from a NumPyro model."""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.infer.util import log_density

import jax
from jax import Array, core, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.errors import IntractableError, StateError
from ebmpp.families import Categorical
from ebmpp.graph.coloring import color_units
from ebmpp.kernels.base import Init, Kwargs
from ebmpp.ppl.conditionals import COLUMNS, Conditionals, Layer, Sites
from ebmpp.ppl.dependence import Terms
from ebmpp.ppl.posterior import Posterior
from ebmpp.ppl.sites import STATES, TRIES, Call, SiteKernel, compare, one_chain, plain

_FEW = 8  # layers that nobody needs be asked for


class ModelBlockState(NamedTuple):
    """The state of :class:`ModelBlock`.

    - **z** - the sites, of the dtypes that they came with.
    - **i** - steps done.
    - **kept** - how often a unit kept its value because its conditional was no law: each of its values
      impossible, or a log density that is not a number.
    - **rng_key** - the block's key; step ``i`` draws from the key and ``i``, so it does not change.
    """

    z: dict[str, Array]
    i: Array
    kept: Array
    rng_key: Array


class ModelBlock(SiteKernel):
    """Discrete sites of a NumPyro model, all units drawn at once: what :meth:`GibbsBlock.from_model` makes.

    The model's log density is traced once, and which of its terms read which units is read off the traced
    program, erring toward interacting (:mod:`ebmpp.ppl.dependence`). The units that interact are coloured by
    networkx; a sweep draws color after color, each from K evaluations of the model for units of K values.

    :param model: a NumPyro model, conditioned on the data.
    :param sites: names of latent sites of finitely many values: Bernoulli, Categorical, Binomial,
        DiscreteUniform, :class:`~ebmpp.EnergyDistribution`, or any law whose support is an interval of whole
        numbers.
    :param args: the model's arguments. Arrays may have other values later, but other shapes need another
        block.
    :param kwargs: its keyword arguments.
    :param num_sweeps: sweeps a step.
    :param unit_by_unit: whether units may be drawn one at a time where (nearly) all of them interact.
    :raises StateError: for sites that the model has not, and subsampled plates.
    :raises IntractableError: for sites of infinitely many values; and where hardly two units can be drawn
        at once, unless ``unit_by_unit``.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        sites: Sequence[str],
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        num_sweeps: int = 1,
        unit_by_unit: bool = False,
    ) -> None:
        self.num_sweeps = checks.count("GibbsBlock.from_model: num_sweeps", num_sweeps)
        self.unit_by_unit = checks.flag("GibbsBlock.from_model: unit_by_unit", unit_by_unit)
        self.call = Call({}, tuple(args), dict(kwargs))
        self.posterior = Posterior(model, sites, *self.call[1:])
        tables = {site: v.table for site, v in self.posterior.values.items()}
        terms = Terms(self.posterior.program, self.posterior.arguments.arrays, tables)
        self.posterior.relied |= terms.relied
        self.conditionals = _in_layers(self.posterior, terms, self.unit_by_unit)

    def __repr__(self) -> str:
        made = f"GibbsBlock.from_model({self.posterior.model!r}, {list(self.sites)})"
        num = self.conditionals.num_layers
        return f"{made}: {self.conditionals.size} units, {num} layer{'s' * (num > 1)}"

    def __reduce__(self) -> tuple:
        options = {"num_sweeps": self.num_sweeps, "unit_by_unit": self.unit_by_unit}
        return _make, (self.posterior.model, self.sites, self.call.args, self.call.kwargs, options)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that are drawn."""
        return self.posterior.sites

    @property
    def layers(self) -> dict[str, np.ndarray]:
        """By site, the number of the layer in which each unit is drawn."""
        colors, shapes = self.conditionals.colors, self.posterior.shapes
        return {s: colors[a:b].reshape(shapes[s]) for s, (a, b) in self.conditionals.spans.items()}

    # -- what it does ----------------------------------------------------------------------------

    def advance(self, values: Sites, call: Call, keys: Array) -> tuple[dict[str, Array], Array]:
        """One step: ``num_sweeps`` sweeps, and how many units kept their values for want of a law.

        :param values: the block's own sites.
        :param call: values of the other sites, and the model's arguments.
        :param keys: words of this step, ``(2,)``: layer l of sweep s draws from those folded with s and l.
        """
        given = self.posterior.inputs(values, call)

        def one(s: Array, carry: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
            own = random.fold_in(keys, s)
            moved, kept = self.conditionals.sweep(carry[0], given, lambda *of: _draw(own, *of))
            return moved, carry[1] + kept

        carry = dict(values), jnp.zeros((), jnp.int32)
        if self.num_sweeps == 1:
            return one(jnp.uint32(0), carry)
        return lax.fori_loop(jnp.uint32(0), jnp.uint32(self.num_sweeps), one, carry)

    def couple(
        self, first: tuple[Sites, Call], second: tuple[Sites, Call], keys: Array
    ) -> tuple[dict[str, Array], dict[str, Array], Array]:
        """One step of two chains, each unit's two conditionals coupled maximally.

        Which units interact is the same in both chains, so their layers are, too.

        :param first: the block's own sites in the leading chain, and what they are surrounded by.
        :param second: likewise in the following chain.
        :param keys: words of this step, ``(2,)``.
        :return: the sites of both, and whether a unit had a conditional that was no law.
        """
        given, laws = [self.posterior.inputs(*side) for side in (first, second)], self.conditionals
        family = Categorical(1, max(2, laws.num_values))

        def sweep(s: Array, carry: tuple) -> tuple:
            own = random.fold_in(keys, s)

            def one(layer: Layer, carry: tuple) -> tuple:
                x, y, broken = carry
                etas = [laws.logits(layer, sites, g) for sites, g in zip((x, y), given, strict=True)]
                words = random.words(random.fold_in(own, layer.number), 3 * len(etas[0])).reshape(-1, 3)
                drawn = family.couple(words, *etas)
                sound = jnp.isfinite(etas[0].max(-1)) & jnp.isfinite(etas[1].max(-1))
                x, y = (laws.put(layer, v, d, sound) for v, d in zip((x, y), drawn, strict=True))
                return x, y, broken | ~sound.all()

            return laws.walk(one, carry)

        carry = dict(first[0]), dict(second[0]), jnp.zeros((), bool)
        return lax.fori_loop(jnp.uint32(0), jnp.uint32(self.num_sweeps), sweep, carry)

    def uniform(self, key: Array) -> dict[str, Array]:
        """Values of the sites, each unit's drawn from those that it can take, all as probable."""
        made = {}
        for number, site in enumerate(self.sites):
            table, valid = (jnp.asarray(a) for a in self.posterior.values[site])
            shape = (*self.posterior.shapes[site], len(table))
            logits = jnp.where(jnp.moveaxis(valid, 0, -1), 0.0, -jnp.inf)
            drawn = jax.random.categorical(jax.random.fold_in(key, number), jnp.broadcast_to(logits, shape))
            values = jnp.broadcast_to(table, (len(table), *shape[:-1]))
            made[site] = jnp.take_along_axis(values, drawn[None], 0)[0]
        return made

    def log_conditionals(
        self, values: Mapping[str, Array], *model_args: Any, **model_kwargs: Any
    ) -> dict[str, Array]:
        """Log probabilities of every unit given everything else.

        :param values: of all latent sites of the model.
        :param model_args: the model's arguments; those the block was made for unless given.
        :param model_kwargs: its keyword arguments.
        :return: a site's ``(*shape, K)``, for its K values in rising order.
        :raises StateError: for missing sites, or shapes that are not the model's.
        """
        own = {site: jnp.asarray(values[site]) for site in self.sites if site in values}
        siblings = {site: jnp.asarray(v) for site, v in values.items() if site not in own}
        call = self.call if not (model_args or model_kwargs) else Call({}, model_args, model_kwargs)
        given = self.posterior.inputs(own, call._replace(siblings=siblings))
        table = jax.nn.log_softmax(jax.jit(self.conditionals.table)(own, given), -1)
        made = {}
        for site, (start, stop) in self.conditionals.spans.items():
            count = len(self.posterior.values[site].table)
            made[site] = table[start:stop, :count].reshape(*self.posterior.shapes[site], count)
        return made

    def verify(
        self,
        model: Callable[..., Any],
        *model_args: Any,
        rng_key: Array | None = None,
        tolerance: float = 1e-3,
        **model_kwargs: Any,
    ) -> None:
        """Compare how a model's log density changes, as layers of units do, with what their conditionals say.

        :param model: the model that the block was made of, or another one of the same sites.
        :param model_args: its arguments.
        :param rng_key: for the random states; a fixed key unless given.
        :param tolerance: relative to the size of the changes.
        :param model_kwargs: its keyword arguments.
        :raises StateError: where they differ, telling by how much.
        """
        key, laws = jax.random.key(0) if rng_key is None else rng_key, self.conditionals
        theirs, ours = [], []
        density = jax.jit(lambda values: log_density(model, model_args, model_kwargs, values)[0])
        table = jax.jit(laws.table)
        for number in range(TRIES):
            own_key = jax.random.fold_in(key, number)
            trace = prototype_trace(model, own_key, model_args, model_kwargs)
            values = {name: jnp.asarray(trace[name]["value"]) for name in latent_sample_sites(trace)}
            own = {site: values[site] for site in self.sites}
            siblings = {name: v for name, v in values.items() if name not in own}
            given = self.posterior.inputs(own, Call(siblings, model_args, model_kwargs))
            rng = np.random.default_rng(int(jax.random.bits(own_key)))
            theirs.append(density(siblings | own))
            ours.append(0.0)
            for _ in range(STATES - 1):
                chosen, change = _redraw(rng, laws, np.asarray(table(own, given), float), own)
                own = self._with(own, *chosen)
                theirs.append(density(siblings | own))
                ours.append(ours[-1] + change)
        compare(np.asarray(theirs), np.asarray(ours), self.sites, tolerance)

    def _with(self, own: Sites, units: np.ndarray, numbers: np.ndarray) -> dict[str, Array]:
        """Sites with some units at values of these numbers."""
        layer = Layer(-1, units, {}, {})
        return self.conditionals.put(layer, own, jnp.asarray(numbers), jnp.ones(len(units), bool))

    # -- NumPyro's contract ----------------------------------------------------------------------

    def init(
        self, rng_key: Array, num_warmup: int, init_params: Init, model_args: tuple, model_kwargs: Kwargs
    ) -> ModelBlockState:
        """The first state; ``init_params`` are the sites' values, which Gibbs gives.

        :raises StateError: for missing sites, or values outside of their support.
        """
        del num_warmup
        one_chain(rng_key)
        if not init_params:
            raise StateError(f"GibbsBlock needs initial values of its sites {sorted(self.sites)}")
        values = {site: plain(jnp.asarray(v)) for site, v in init_params.items()}
        self.posterior.inputs(values, Call.of(model_args, model_kwargs))
        self._check_values(values)
        none = jnp.zeros((), jnp.int32)
        return ModelBlockState(values, none, none, rng_key)

    def _check_values(self, values: Sites) -> None:
        """:raises StateError: for one that its unit cannot take."""
        for site, value in values.items():
            table, valid = self.posterior.values[site]
            if isinstance(value, core.Tracer):
                continue
            known = ((np.asarray(value) == table) & valid).any(0)
            if not known.all():
                wrong = np.asarray(value)[~np.broadcast_to(known, value.shape)][0]
                raise StateError(
                    f"site {site!r} is {wrong!r} somewhere, expected one of {np.unique(table).tolist()[:8]}"
                )

    def sample(self, state: ModelBlockState, model_args: tuple, model_kwargs: Kwargs) -> ModelBlockState:
        """One step, given the siblings' values in ``model_kwargs``."""
        keys = random.fold_in(random.key_pair(state.rng_key), (state.i + 1).astype(jnp.uint32))
        z, kept = self.advance(state.z, Call.of(model_args, model_kwargs), keys)
        return ModelBlockState(z, state.i + 1, state.kept + kept, state.rng_key)

    def get_diagnostics_str(self, state: ModelBlockState) -> str:
        """Steps done, and units that could not move."""
        kept = int(np.sum(state.kept))
        told = f", {kept} draws kept a value for want of a law" if kept else ""
        return f"{int(np.max(state.i))} steps of {list(self.sites)}{told}"


class ModelFunction:
    """A block as a function for :class:`numpyro.infer.HMCGibbs`: what :func:`gibbs_fn` makes of it."""

    def __init__(self, block: ModelBlock) -> None:
        self.block = block

    def __call__(self, rng_key: Array, gibbs_sites: Sites, hmc_sites: Sites) -> dict[str, Array]:
        call = self.block.call._replace(siblings=hmc_sites)
        return self.block.advance(gibbs_sites, call, random.key_pair(rng_key))[0]


def _make(model: Any, sites: Any, args: tuple, kwargs: Any, options: Mapping[str, Any]) -> ModelBlock:
    return ModelBlock(model, sites, args, kwargs, **options)


def _draw(keys: Array, layer: Layer, logits: Array) -> tuple[Array, Array]:
    """Values of a layer, by number, and which of them had a law."""
    uniforms = random.uniform(random.words(random.fold_in(keys, layer.number), len(logits)))
    if logits.shape[1] > COLUMNS:
        drawn = random.inverse_cdf(uniforms, jax.nn.softmax(logits, -1))
        return drawn, jnp.isfinite(logits.max(-1))
    # the same, value by value: XLA on CPU is five times slower along a short last axis
    columns = [logits[:, k] for k in range(logits.shape[1])]
    top = functools.reduce(jnp.maximum, columns)
    cumulated = list(itertools.accumulate(jnp.exp(column - top) for column in columns))
    threshold = uniforms * cumulated[-1]
    drawn = sum(((c <= threshold).astype(jnp.int32) for c in cumulated[:-1]), jnp.zeros(len(top), jnp.int32))
    return drawn, jnp.isfinite(top)


def _in_layers(posterior: Posterior, terms: Terms, unit_by_unit: bool) -> Conditionals:
    """:raises IntractableError: where hardly two units can be drawn at once, and nobody asked for that."""
    size, edges = terms.sets.size, terms.edges
    if edges is not None:
        colors = color_units(size, edges) if len(edges) else np.zeros(size, int)
        layers = int(colors.max(initial=0)) + 1
        if layers <= _FEW or 2 * layers <= size:
            return Conditionals(posterior, terms, colors)
    if unit_by_unit:
        return Conditionals(posterior, None, np.arange(size))
    values = max(len(v.table) for v in posterior.values.values())
    together = terms.most_together
    all_of = f"all {size} units" if together == size else f"up to {max(together, 2)} of the {size} units"
    raise IntractableError(
        f"from_model: {all_of} of sites {list(posterior.sites)} interact with one another (one term of the "
        "log density reads them, as a regression reads all its indicators), so that hardly two can be drawn "
        f"at once. One unit at a time a sweep takes {size} x {values} = {size * values} evaluations of the "
        "model's log density; ask for that with unit_by_unit=True, or declare the graph: GibbsBlock(graph, "
        "sites, params)"
    )


def _redraw(
    rng: np.random.Generator, laws: Conditionals, table: np.ndarray, own: Sites
) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """Possible values of a random layer, and how the conditionals say that the log density changes."""
    layer = rng.integers(laws.num_layers)
    units = np.flatnonzero(laws.colors == layer)
    now = laws.numbers(own)[units]
    possible = np.isfinite(table[units])
    new = np.where(possible, rng.random(possible.shape), -1).argmax(1)
    new = np.where(possible.any(1), new, now)
    at = table[units]
    rows = np.arange(len(units))
    moved = new != now
    return (units, new), float((at[rows, new] - at[rows, now])[moved].sum())
