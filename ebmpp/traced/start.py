# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The start of a block's chains: possible states, found by search where a prior draw is impossible.

A Gibbs sampler does not leave a state of probability 0 if all values of each unit are
impossible given the others. The search draws units from the conditionals of a relaxed
log density, in which fewer impossible elements are more probable, and starts again from
draws of the prior, given continuous sites that are uniform over (-2, 2) unconstrained.
"""

from collections.abc import Callable, Mapping
import functools
import logging
import threading
from typing import Any

import numpy as np
from numpyro.distributions import biject_to

import jax
from jax import Array, lax
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import SiteArrays, checks, is_concrete, random, select
from ebmpp.distribution import EnergyDistribution
from ebmpp.errors import StateError
from ebmpp.traced.block import Call, SiteValues
from ebmpp.traced.model import Context, Inputs, ModelInfo
from ebmpp.traced.rows import all_in_row, checked, is_staged, on_rows
from ebmpp.traced.sweep import BlockSweep

# of the prior, and sweeps from each
_MOST_DRAWS = 20
_MOST_SWEEPS = 50
_SEARCH = 1 << 22  # folded into the keys of the search


class BlockStart:
    """Checks of the first states of chains of a block, and a search for possible ones."""

    def __init__(self, info: ModelInfo, sweep: BlockSweep) -> None:
        self.info = info
        self.sweep = sweep
        self.posterior = sweep.posterior

        def inspect(inputs, keys):
            return self.posterior.log_density(inputs), sweep.invalid(inputs, keys)

        self._inspect = _over_rows(inspect)
        self._find = _over_rows(self._search)

    def __call__(
        self,
        values: SiteValues,
        call: Call,
        keys: Array,
        origin: str,
    ) -> SiteArrays:
        """Return the values, or possible ones near them; under ``jax.vmap`` of all chains at once.

        :param origin: "given" by the user, who may not want others; "siblings" for
            values that may be impossible given the siblings; "prior" for draws, which
            may also be at the edge of their support.
        :raises StateError: for values outside of their support, impossible states and
            data, nan in the data, and conditionals that are nan.
        """
        self.info.check_data(call)
        context = self.info.context(values, call)
        if is_staged():
            return self._check_staged((values, context))
        mapped = jax.tree.map(lambda v: v if isinstance(v, Tracer) else None, context)
        fixed = jax.tree.map(lambda v: None if isinstance(v, Tracer) else v, context)

        def check(rows):
            return self._check(*rows, fixed, call, origin)

        return on_rows(check, (dict(values), mapped, keys))

    def _check(
        self,
        values: SiteValues,
        mapped: Context,
        keys: Array,
        fixed: Context,
        call: Call,
        origin: str,
    ) -> SiteArrays:
        """Return possible states of all chains, the rows.

        :param mapped: what has a row for each chain, None elsewhere; ``fixed`` the
            rest.
        """
        inside = self._inside(values)
        if origin != "prior":
            self._refuse_outside(inside, values)
        log_prob, invalid = self._inspect(values, mapped, keys, fixed)
        is_inside = np.all(list(inside.values()), 0)
        is_lost = np.isneginf(log_prob) | ~is_inside
        is_possible = np.isfinite(log_prob)
        is_known = (is_possible | is_lost).all()
        if not is_known and (names := self.info.arguments.with_nan(call)):
            raise checks.state_error(
                "arguments of the model",
                "without nan where the log density reads it",
                names,
                hint="Leave missing data out, or exclude them by numpyro.handlers.mask.",
            )
        if origin != "given" and is_lost.any():
            text = (
                f"searching for a possible start of {list(values)}; init_params save it"
            )
            timer = threading.Timer(1.0, logging.getLogger("ebmpp").warning, [text])
            timer.start()
            result = self._find(values, mapped, keys, fixed)
            values, is_possible = jax.block_until_ready(result)
            timer.cancel()
        for site, mask in invalid.items():
            self._refuse_invalid(site, np.asarray(mask)[~is_lost])
        if not is_possible.all():
            row = np.argmin(is_possible)
            values, mapped = jax.tree.map(lambda a: a[row], (values, mapped))
            self._refuse_impossible(values, _merged(mapped, fixed))
        return dict(values)

    def _check_staged(self, inputs: Inputs) -> SiteArrays:
        """Return the values; the compiled program raises the error, without a search."""
        values = dict(inputs[0])
        log_prob = self.posterior.log_density(inputs)

        def check(rows):
            values, inside, log_prob = rows
            self._refuse_outside(inside, values)
            if not np.isfinite(log_prob).all():
                self._refuse_impossible(values, None)

        return checked(check, (values, self._inside(values), log_prob))[0]

    def _inside(self, values: SiteValues) -> SiteArrays:
        """Return, by site, True where the value is in its support, for each chain."""
        result = {}
        for site, value in values.items():
            support: Any = self.info.distributions[site].support
            inside = jnp.asarray(support(value)) & True
            num_axes = jnp.ndim(value) - self.info.latent[site].ndim
            is_finite = all_in_row(jnp.isfinite(value), num_axes)
            result[site] = all_in_row(inside, num_axes) & is_finite
        return result

    def check_values(self, values: SiteValues, context: Context) -> None:
        """Raise a StateError for known values of any site outside of their support."""
        if not is_concrete((values, context)):
            return
        with jax.ensure_compile_time_eval():
            are_inside = all(self._inside(values).values())
        if not are_inside or any(map(self.info.has_varying_support, values)):
            inputs = self.info.counts.inputs(values, context.arguments)
            inside = {site: self.info.is_inside(site, inputs) for site in values}
            if is_concrete(inside):  # not of a scan within jax.jit
                self._refuse_outside(inside, values)

    def is_possible(self, inputs: Inputs) -> Array:
        """Return True for values in their supports, of a finite log density."""
        inside = self._inside(inputs[0]).values()
        is_finite = jnp.isfinite(self.posterior.log_density(inputs))
        return functools.reduce(jnp.logical_and, inside, is_finite)

    def relaxed(self, inputs: Inputs, keys: Array) -> SiteArrays:
        """Draw the values by conditionals in which fewer impossible elements are more probable."""
        with self.sweep.joint.program.relaxed():
            moved, _ = self.sweep(inputs, keys)
        return {site: moved[site].astype(v.dtype) for site, v in inputs[0].items()}

    def draw_energies(self, keys: Array) -> SiteArrays:
        """Draw the sites whose prior is an energy, uniformly from the values of each unit."""
        drawn = {}
        for number, site in enumerate(self.info.sites):
            if not isinstance(self.info.distributions[site], EnergyDistribution):
                continue
            table, valid = self.posterior.values[site]
            shape = (len(table), *self.posterior.shapes[site])
            logits = jnp.broadcast_to(jnp.where(valid, 0.0, -jnp.inf), shape)
            key = jax.random.fold_in(random.as_key(keys), number)
            picked = jax.random.categorical(key, jnp.moveaxis(logits, 0, -1))
            drawn[site] = jnp.take_along_axis(jnp.asarray(table), picked[None], 0)[0]
        return drawn

    def draw_spread(self, keys: Array) -> SiteArrays:
        """Draw continuous sites as NUTS starts them, uniformly over (-2, 2) unconstrained.

        Draws of a vague prior underflow, or are far from the data. Samplers of gamma
        distributions also take seconds to compile.
        """
        transforms: dict[str, Any] = {
            site: biject_to(prior.support)
            for site, prior in self.info.distributions.items()
            if self.info.kind(site)
        }
        start = {
            site: jnp.zeros(transform.inverse_shape(self.info.latent[site].shape))
            for site, transform in transforms.items()
        }
        zeros, unravel = ravel_pytree(start)
        key = random.as_key(keys)
        drawn = unravel(jax.random.uniform(key, zeros.shape, minval=-2, maxval=2))
        return {site: transforms[site](v) for site, v in drawn.items()}

    def _search(self, inputs: Inputs, keys: Array) -> tuple[SiteArrays, Array]:
        """Return values by search, and whether they are possible.

        In the second half siblings are drawn too, as later kernels, such as NUTS, find
        values that fit.
        """
        values, context = inputs

        def split(x):
            siblings = select(x, context.siblings)
            return select(x, values), context._replace(siblings=siblings)

        def draw(x, keys, is_late):
            fixed = {**self.draw_energies(keys), **self.draw_spread(keys)}
            key = random.as_key(keys)
            trace = self.info.trace(fixed, context.arguments, key)
            result = {}
            for site, v in x.items():
                drawn = jnp.asarray(trace[site]["value"], v.dtype)
                result[site] = jnp.where(is_late | (site in values), drawn, v)
            return result

        def sweep(x, keys):
            return x | self.relaxed(split(x), keys)

        def is_possible(x):
            return self.is_possible(split(x))

        start = {**context.siblings, **values}
        x, possible = search(start, keys, draw, sweep, is_possible)
        return split(x)[0], possible

    def _refuse_outside(
        self, inside: Mapping[str, ArrayLike], values: SiteValues
    ) -> None:
        for site, is_inside in inside.items():
            if not np.all(is_inside):
                support: Any = self.info.distributions[site].support
                if self.info.has_varying_support(site):
                    support = "its support given the other sites"
                raise checks.state_error(
                    f"site {site!r}", f"in {support}", np.asarray(values[site]).tolist()
                )

    def _refuse_invalid(self, site: str, mask: np.ndarray) -> None:
        """Raise a StateError for a conditional that is nan in one of the chains."""
        if not mask.any():
            return
        _, *place, number = np.argwhere(mask)[0].tolist()
        place = tuple(place)
        where = ""
        if site in self.posterior.values:
            table = self.posterior.values[site].table
            values = np.broadcast_to(table[number], self.posterior.shapes[site])
            where = f" where it is {values[place]:g}"
        raise StateError(
            f"the conditional of unit {place} of site {site!r} is nan{where} and "
            "would never move. Look for nan in the model's arguments, inf - inf "
            "and 0 * inf, or start elsewhere by init_params"
        )

    def _refuse_impossible(self, values: SiteValues, context: Context | None) -> None:
        """Raise a StateError that names the sites, and those whose log density is not finite."""
        culprits = []
        if context is not None:
            trace = self.info.trace({**context.siblings, **values}, context.arguments)
            for name, site in trace.items():
                if site["type"] == "sample":
                    log_prob = site["fn"].log_prob(site["value"])
                    if not np.isfinite(log_prob).all():
                        culprits.append(repr(name))
        where = f" at site {', '.join(culprits)}" if culprits else ""
        raise StateError(
            f"the block of sites {list(values)} must start at a possible state, got "
            f"one whose log density is not finite{where}. Give possible init_params, "
            "or check that there are any for these data"
        )


def search(
    x: SiteValues,
    keys: Array,
    draw: Callable,
    sweep: Callable,
    is_possible: Callable[[dict], Array],
) -> tuple[SiteArrays, Array]:
    """Return a state if it is possible, else one that a search finds; and whether that is possible.

    :param keys: words of the start, ``(2,)``.
    :param draw: ``(state, keys, is_late)`` to a state from which to search; late in the
        second half.
    :param sweep: ``(state, keys)`` to a less impossible state.
    """
    period = _MOST_SWEEPS + 1

    def is_lost(carry):
        number, _, possible = carry
        return ~possible & (number < _MOST_DRAWS * period)

    def step(carry):
        # one program of each part: they are as large as the model
        number, x, _ = carry
        first = number // period * _MOST_SWEEPS
        place = number % period
        is_late = first >= _MOST_DRAWS // 2 * _MOST_SWEEPS
        drawn = draw(x, random.fold_in(keys, first, _SEARCH + 1), is_late)
        swept = sweep(x, random.fold_in(keys, first + place - 1, _SEARCH))
        x = {
            site: jnp.where(
                place > 0, swept[site], jnp.where(first > 0, drawn[site], v)
            )
            for site, v in x.items()
        }
        return number + 1, x, is_possible(x)

    # all mapped by vmap from the start, which then maps the loop once, not three times
    no = keys[0] < 0
    arrays = {site: jnp.where(no, v, v) for site, v in x.items()}
    start = no.astype(jnp.uint32), arrays, no
    _, x, possible = lax.while_loop(is_lost, step, start)
    return x, possible


def _over_rows(fn: Callable) -> Callable:
    """Return a compiled ``fn(inputs, keys)`` of all chains; see :meth:`BlockStart._check`."""

    def in_row(values, mapped, keys, fixed):
        return fn((values, _merged(mapped, fixed)), keys)

    return jax.jit(jax.vmap(in_row, (0, 0, 0, None)))


def _merged(mapped: Context, fixed: Context) -> Context:
    return jax.tree.map(
        lambda a, b: b if a is None else a,
        mapped,
        fixed,
        is_leaf=lambda a: a is None,
    )
