# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A block of Gibbs that follows from a NumPyro model."""

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, cast

import numpy as np
from numpyro import handlers
import numpyro.distributions as dist

import jax
from jax import Array, core, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.distribution.intractable import read_by_params
from ebmpp.errors import IntractableError, StateError
from ebmpp.families import Categorical
from ebmpp.kernels.base import Init, Kwargs
from ebmpp.traced import tempered
from ebmpp.traced.block import Call, SiteKernel, one_chain, plain
from ebmpp.traced.conditionals import Conditionals, Layer, Sites
from ebmpp.traced.posterior import Posterior, Reading
from ebmpp.traced.start_check import LawCheck
from ebmpp.traced.sweep import ModelSweep
from ebmpp.traced.verify import compare_with

_HEATED = 1 << 19  # what the keys of the latents that a transition begins with are folded with


class ModelBlockState(NamedTuple):
    """The state of :class:`ModelBlock`.

    - **z** - the sites, of the dtypes that they came with.
    - **i** - steps done.
    - **kept** - how often a unit kept its value because its conditional was no law: each of its values
      impossible, or a log density that is not a number.
    - **transitions** - tempered transitions taken so far; 0 without ``tempering``.
    - **rng_key** - the block's key; step ``i`` draws from the key and ``i``, so it does not change.
    """

    z: dict[str, Array]
    i: Array
    kept: Array
    transitions: Array
    rng_key: Array


class Advanced(NamedTuple):
    """A step that is done: the sites, and by how much the counts of the state grew."""

    z: dict[str, Array]
    kept: Array
    transitions: Array


class ModelBlock(SiteKernel):
    """Sites of a NumPyro model, many units drawn at once: what :meth:`GibbsBlock.from_model` makes.

    The model's log density is traced once, and which of its terms read which units is read off the traced
    program, erring toward interacting (:mod:`ebmpp.traced.dependence`). The discrete units that interact are
    coloured by networkx; a sweep draws color after color, each from K evaluations of the model for units of K
    values, and then the continuous sites, each from two derivatives (``ebmpp.traced.continuous``). Latents of
    energy priors that tie the units are drawn first, given the sites (``ebmpp.traced.augmented``).

    :param model: a NumPyro model, conditioned on the data.
    :param sites: names of latent sites; see :meth:`GibbsBlock.from_model`.
    :param args: the model's arguments. Arrays may have other values later, but other shapes need another
        block.
    :param kwargs: its keyword arguments.
    :param num_sweeps: sweeps a step.
    :param unit_by_unit: whether units may be drawn one at a time where (nearly) all of them interact.
    :param clusters: whether a sweep begins with a move of clusters.
    :param tempering: inverse temperatures, for a tempered transition after the sweeps of a step.
    :raises StateError: for sites that the model has not, and subsampled plates.
    :raises IntractableError: for sites that cannot be drawn; and where hardly two units can be drawn at once,
        unless ``unit_by_unit``.
    :raises ArgumentError: for ``tempering`` that does not increase from more than 0 to 1.
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
        clusters: bool = False,
        tempering: Any = None,
    ) -> None:
        self.num_sweeps = checks.count("GibbsBlock.from_model: num_sweeps", num_sweeps)
        self.unit_by_unit = checks.flag("GibbsBlock.from_model: unit_by_unit", unit_by_unit)
        self.clusters = checks.flag("GibbsBlock.from_model: clusters", clusters)
        self.tempering = tempered.check_tempering("GibbsBlock.from_model: tempering", tempering)
        self.call = Call({}, tuple(args), dict(kwargs))
        self.sweep = ModelSweep(Reading(model, sites, *self.call[1:]), self.unit_by_unit, self.clusters)
        self._laws = LawCheck(self.sweep)
        if self.tempering is not None:
            self._check_tempered()

    def _check_tempered(self) -> None:
        """:raises IntractableError: where a continuous site would be heated with latents summed out."""
        augmented = self.sweep.augmented
        names = [site.name for site in self.sweep.continuous]
        if augmented is None or not names:
            return
        read = read_by_params(self.posterior.model, self.call.args, self.call.kwargs, known=True)
        for site, _ in augmented.blocks.values():
            clash = [name for name in read[site] if name in names]
            if clash:
                raise IntractableError(
                    f"from_model: tempering heats the latents of site {site!r} too, and the conditional of "
                    f"site {clash[0]!r}, on which its params depend, is known with them summed out; leave "
                    f"tempering away, or {clash[0]!r} to another block"
                )

    def __repr__(self) -> str:
        model = self.posterior.model
        name = model.__qualname__ if isinstance(model, FunctionType) else repr(model)
        made = f"GibbsBlock.from_model({name}, {list(self.sites)})"
        laws = self.conditionals
        told = [f"{site.family} {site.name!r}" for site in self.sweep.continuous]
        if laws is not None:
            told.insert(0, f"{laws.size} units, {laws.num_layers} layer{'s' * (laws.num_layers > 1)}")
        if self.sweep.augmented is not None:
            told.insert(1, f"given {self.sweep.augmented.num_latents} latents of the prior")
        return f"{made}: {', '.join(told)}"

    def __copy__(self) -> "ModelBlock":
        """The same block; it is not made anew, as it is of a pickle, which cannot be while one is traced."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce__(self) -> tuple:
        options: dict[str, Any] = {"num_sweeps": self.num_sweeps, "unit_by_unit": self.unit_by_unit}
        options |= {"clusters": self.clusters, "tempering": self.tempering}
        return _make, (self.posterior.model, self.sites, self.call.args, self.call.kwargs, options)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that are drawn."""
        return self.sweep.sites

    @property
    def posterior(self) -> Posterior:
        """The log density as a function of the discrete sites."""
        return self.sweep.posterior

    @property
    def conditionals(self) -> Conditionals | None:
        """Laws of the discrete units; None without such."""
        return self.sweep.conditionals

    @property
    def layers(self) -> dict[str, np.ndarray]:
        """By discrete site, the number of the layer in which each unit is drawn."""
        laws, shapes = self.conditionals, self.posterior.shapes
        if laws is None:
            return {}
        return {s: laws.colors[a:b].reshape(shapes[s]) for s, (a, b) in laws.spans.items()}

    # -- what it does ----------------------------------------------------------------------------

    def advance(self, values: Sites, call: Call, keys: Array) -> Advanced:
        """One step: ``num_sweeps`` sweeps, and a tempered transition where such are asked for.

        :param values: the block's own sites.
        :param call: values of the other sites, and the model's arguments.
        :param keys: words of this step, ``(2,)``: layer l of sweep s draws from those folded with s and l.
        """

        self.sweep.check(values)

        def one(s: Array, carry: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
            moved, kept = self.sweep(carry[0], call, random.fold_in(keys, s))
            return self.sweep.without_latents(moved), carry[1] + kept

        none = jnp.zeros((), jnp.int32)
        if self.num_sweeps == 1:
            z, kept = one(jnp.uint32(0), (dict(values), none))
        else:
            z, kept = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.num_sweeps), one, (dict(values), none))
        if self.tempering is None:
            return Advanced(z, kept, none)
        z, took, more = tempered.transition(
            self.tempering,
            lambda z: self.sweep.log_density(z, call),
            lambda z, own, beta, backward: self.sweep(z, call, own, beta, backward),
            self.sweep.with_latents(z, call, random.fold_in(keys, 0, _HEATED)),
            keys,
        )
        return Advanced(self.sweep.without_latents(z), kept + more, took.astype(jnp.int32))

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
        laws = cast(Conditionals, self.conditionals)  # CoupledComposite takes no other
        family = Categorical(1, max(2, laws.num_values))

        def sweep(s: Array, carry: tuple) -> tuple:
            own, sides = random.fold_in(keys, s), ((carry[0], first[1]), (carry[1], second[1]))
            whole = self.sweep.couple_latents(*sides, own)
            given = [self.sweep.given(laws.posterior, v, c) for v, (_, c) in zip(whole, sides, strict=True)]

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
        """Log probabilities of every unit given everything else, the latents of priors summed out.

        :param values: of all latent sites of the model.
        :param model_args: the model's arguments; those the block was made for unless given.
        :param model_kwargs: its keyword arguments.
        :return: a site's ``(*shape, K)``, for its K values in rising order.
        :raises StateError: for missing sites, or shapes that are not the model's.
        """
        laws, own, call = self.sweep.collapsed, *self._apart(values, model_args, model_kwargs)
        if laws is None:
            return {}
        given = self.sweep.given(self.posterior, own, call)
        discrete = {site: own[site] for site in self.posterior.sites}
        table, made = jax.nn.log_softmax(jax.jit(laws.table)(discrete, given), -1), {}
        for site, (start, stop) in laws.spans.items():
            count = len(self.posterior.values[site].table)
            made[site] = table[start:stop, :count].reshape(*self.posterior.shapes[site], count)
        return made

    def conditional(
        self, site: str, values: Mapping[str, Array], *model_args: Any, **model_kwargs: Any
    ) -> dist.Distribution:
        """The law of a continuous site given everything else.

        :param site: its name.
        :param values: of all latent sites of the model.
        :param model_args: the model's arguments; those the block was made for unless given.
        :param model_kwargs: its keyword arguments.
        :return: a Normal, Gamma or InverseGamma of the site's shape; of units that interact a
            MultivariateNormal of the flattened site.
        :raises StateError: for another site, missing sites, or shapes that are not the model's.
        """
        named = {c.name: c for c in self.sweep.continuous}
        checks.names("continuous site", [site], named, StateError)
        own, call = self._apart(values, model_args, model_kwargs)
        one = named[site]
        return one.distribution(one.law(own[site], self.sweep.given(one.posterior, own, call)))

    def _apart(self, values: Sites, args: tuple, kwargs: Mapping[str, Any]) -> tuple[dict[str, Array], Call]:
        """The block's own sites, and what surrounds them."""
        return self.sweep.apart(values, self.call if not (args or kwargs) else Call({}, args, kwargs))

    def verify(
        self,
        model: Callable[..., Any],
        *model_args: Any,
        rng_key: Array | None = None,
        tolerance: float = 1e-3,
        **model_kwargs: Any,
    ) -> None:
        """Compare how a model's log density changes, as sites move, with what the conditionals say.

        Layers of discrete units move to random values, continuous sites to draws of their laws.

        :param model: the model that the block was made of, or another one of the same sites.
        :param model_args: its arguments.
        :param rng_key: for the random states; a fixed key unless given.
        :param tolerance: relative to the size of the changes.
        :param model_kwargs: its keyword arguments.
        :raises StateError: where they differ, telling by how much.
        """
        key = jax.random.key(0) if rng_key is None else rng_key
        compare_with(self.sweep, model, model_args, model_kwargs, key, tolerance)

    # -- NumPyro's contract ----------------------------------------------------------------------

    def init(
        self, rng_key: Array, num_warmup: int, init_params: Init, model_args: tuple, model_kwargs: Kwargs
    ) -> ModelBlockState:
        """The first state; ``init_params`` are the sites' values, which Gibbs gives.

        A block of all latent sites is a kernel by itself: it then begins at a draw of the prior, unless
        ``init_params`` say otherwise.

        :raises StateError: for missing sites, values outside of their support, or units whose conditional
            is not a number there, which would never move.
        """
        del num_warmup
        one_chain(rng_key)
        if not init_params:
            if set(self.sites) != set(self.posterior.shapes):
                raise StateError(f"GibbsBlock needs initial values of its sites {sorted(self.sites)}")
            seeded = handlers.seed(self.posterior.model, rng_key)
            drawn = handlers.trace(seeded).get_trace(*model_args, **dict(model_kwargs or {}))
            init_params = {site: drawn[site]["value"] for site in self.sites}
        values = {site: plain(jnp.asarray(v)) for site, v in init_params.items()}
        self.sweep.check(values)
        call = Call.of(model_args, model_kwargs)
        self.sweep.given(self.posterior, values, call)
        self._check_values(values)
        self._laws(values, call, rng_key)
        none = jnp.zeros((), jnp.int32)
        return ModelBlockState(values, none, none, none, rng_key)

    def _check_values(self, values: Sites) -> None:
        """:raises StateError: for one that its unit cannot take."""
        for site, value in values.items():
            if isinstance(value, core.Tracer):
                continue
            if site not in self.posterior.values:
                positive = next(c.positive for c in self.sweep.continuous if c.name == site)
                if not (np.isfinite(value) & ((np.asarray(value) > 0) | (not positive))).all():
                    wanted = "positive" if positive else "finite"
                    raise StateError(f"site {site!r} is {value!r}, expected {wanted} numbers")
                continue
            table, valid = self.posterior.values[site]
            known = ((np.asarray(value) == table) & valid).any(0)
            if not known.all():
                wrong = np.asarray(value)[~np.broadcast_to(known, value.shape)][0]
                raise StateError(
                    f"site {site!r} is {wrong!r} somewhere, expected one of {np.unique(table).tolist()[:8]}"
                )

    def sample(self, state: ModelBlockState, model_args: tuple, model_kwargs: Kwargs) -> ModelBlockState:
        """One step, given the siblings' values in ``model_kwargs``."""
        keys = random.fold_in(random.key_pair(state.rng_key), (state.i + 1).astype(jnp.uint32))
        made = self.advance(state.z, Call.of(model_args, model_kwargs), keys)
        kept, transitions = state.kept + made.kept, state.transitions + made.transitions
        return ModelBlockState(made.z, state.i + 1, kept, transitions, state.rng_key)

    def get_diagnostics_str(self, state: ModelBlockState) -> str:
        """Steps done, and units that could not move."""
        kept = int(np.sum(state.kept))
        told = f", {kept} draws kept a value for want of a law" if kept else ""
        if self.tempering is not None:
            rate = np.asarray(state.transitions).mean() / max(1, int(np.max(state.i)))
            told = f", tempered transitions taken {rate:.2g}{told}"
        return f"{int(np.max(state.i))} steps of {list(self.sites)}{told}"


class ModelFunction:
    """A block as a function for :class:`numpyro.infer.HMCGibbs`: what :func:`gibbs_fn` makes of it."""

    def __init__(self, block: ModelBlock) -> None:
        self.block = block

    def __call__(self, rng_key: Array, gibbs_sites: Sites, hmc_sites: Sites) -> dict[str, Array]:
        call = self.block.call._replace(siblings=hmc_sites)
        return self.block.advance(gibbs_sites, call, random.key_pair(rng_key)).z


def _make(model: Any, sites: Any, args: tuple, kwargs: Any, options: Mapping[str, Any]) -> ModelBlock:
    return ModelBlock(model, sites, args, kwargs, **options)
