# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The start of a block's chains: given or drawn values, checked, or possible ones by search.

A Gibbs sampler does not leave a state of probability 0 if all values of each unit are
impossible given the others. The search draws units from the conditionals of a relaxed
log density, in which fewer impossible elements are more probable, and starts again from
other draws.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import logging
import math
import threading
from typing import Any
import warnings

import numpy as np
from numpyro.infer.initialization import init_to_uniform, init_to_value

import jax
from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    Numbers,
    SiteArrays,
    at_index,
    checks,
    compiled,
    is_concrete,
    random,
    select,
)
from ebmpp.errors import StateError
from ebmpp.traced.block import Call, SiteValues
from ebmpp.traced.data import values_in
from ebmpp.traced.model import Context, Inputs, ModelInfo
from ebmpp.traced.rows import all_in_row, checked, is_staged, on_rows
from ebmpp.traced.sweep import BlockSweep

# of starts, and sweeps from each
_MOST_DRAWS = 20
_MOST_SWEEPS = 50
_SEARCH = 1 << 22  # folded into the keys of the search
#: An initialisation strategy of NumPyro, from a site to its value or None.
Strategy = Callable[..., Any]
#: Values of all sites; by site, if they are in the support; the log density; by site, a
#: mask of the conditionals that are nan.
Begun = tuple[SiteArrays, SiteArrays, Array, SiteArrays]


class BlockStart:
    """Starts of a block's chains: given values or draws, their checks, and a search.

    :param strategy: of NumPyro; None for ``init_to_uniform``.
    """

    def __init__(
        self, info: ModelInfo, sweep: BlockSweep, strategy: Strategy | None
    ) -> None:
        self.info = info
        self.sweep = sweep
        self.posterior = sweep.posterior
        self.strategy = strategy
        named = named_values("GibbsBlock.from_model", strategy)
        checks.names("site of init_strategy", named, info.latent, StateError)
        #: values that the strategy names, of any sites of the model
        self.named = self._cast(named)
        self._begin = _over_rows(self._first, once=True)
        self._find = _over_rows(self._search)

    def __call__(
        self, values: SiteValues, call: Call, rng_key: Array, is_free: bool = False
    ) -> SiteArrays:
        """Return values of all sites, possible ones; under ``jax.vmap`` of all chains at once.

        :param values: of some or all sites. The others are drawn, and searched where
            these are impossible.
        :param is_free: True if the values may be draws of the prior, which a search may
            replace.
        :raises StateError: for values outside of their support, impossible states and
            data, nan in the data, and conditionals that are nan.
        """
        self.info.check_data(call)
        prototypes = select(self.info.latent, self.info.sites)
        context = self.info.context({**prototypes, **values}, call)
        values = self._cast(values)
        if is_staged():
            return self._check_staged((values, context), random.key_pair(rng_key))
        mapped = jax.tree.map(lambda v: v if isinstance(v, Tracer) else None, context)
        fixed = jax.tree.map(lambda v: None if isinstance(v, Tracer) else v, context)

        def check(rows):
            return self._check(*rows, fixed, call, is_free)

        return on_rows(check, (values, mapped, rng_key))

    def _cast(self, values: Mapping[str, ArrayLike]) -> SiteArrays:
        """Return values of sites as arrays; booleans as integers for NumPyro's summary."""
        result = {}
        for site, value in values.items():
            dtype = self.info.latent[site].dtype
            value = jnp.asarray(value)
            if jnp.issubdtype(dtype, np.floating):
                value = value.astype(dtype)
            result[site] = value.astype(jnp.int8) if value.dtype == bool else value
        return result

    def _check(
        self,
        fixed_values: SiteValues,
        mapped: Context,
        rng_keys: Array,
        fixed: Context,
        call: Call,
        is_free: bool,
    ) -> SiteArrays:
        """Return possible states of all chains, the rows.

        :param mapped: what has a row for each chain, None elsewhere; ``fixed`` the
            rest.
        """
        values, inside, log_prob, invalid = self._begin(
            fixed_values, mapped, rng_keys, fixed
        )
        valid = select(inside, fixed_values)
        if is_free:
            valid = {
                site: v | self._at_edge(site, fixed_values) for site, v in valid.items()
            }
        self._refuse_outside(valid, fixed_values)
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
        if (is_free or len(fixed_values) < len(values)) and is_lost.any():
            text = (
                f"searching for a possible start of {list(values)}; init_params or an "
                "init_strategy with possible values save it"
            )
            timer = threading.Timer(1.0, logging.getLogger("ebmpp").warning, [text])
            timer.start()
            held = {} if is_free else fixed_values
            result = self._find((held, values), mapped, rng_keys, fixed)
            values, is_possible = jax.block_until_ready(result)
            timer.cancel()
        for site, mask in invalid.items():
            self._refuse_invalid(site, np.asarray(mask)[~is_lost])
        if not is_possible.all():
            row = np.argmin(is_possible)
            values, mapped = jax.tree.map(lambda a: a[row], (values, mapped))
            self._refuse_impossible(values, _merged(mapped, fixed))
        return dict(values)

    def _at_edge(self, site: str, values: SiteValues) -> Any:
        """Return True for rows at the edge of their support, to which vague priors round."""
        if "positive" not in self.info.kinds(site):
            return False
        value = np.asarray(values[site])
        is_edge = np.isin(value, (0, 1, np.inf)) | self.info.support(site)(value)
        return is_edge.reshape(len(is_edge), -1).all(1)

    def _check_staged(self, inputs: Inputs, keys: Array) -> SiteArrays:
        """Return the values; the compiled program raises the error, without a search."""
        fixed_values = inputs[0]
        values, inside, log_prob, _ = self._first(inputs, keys)

        def check(rows):
            values, inside, log_prob = rows
            self._refuse_outside(select(inside, fixed_values), values)
            if not np.isfinite(log_prob).all():
                self._refuse_impossible(values, None)

        return checked(check, (values, inside, log_prob))[0]

    def _first(self, inputs: Inputs, keys: Array) -> Begun:
        """Return given and drawn values, which are in their support, the log density, and nan.

        Discrete sites that are drawn are drawn given the continuous ones.
        """
        values, context = inputs
        x, held = self.draw({**context.siblings, **values}, context.arguments, keys)
        inputs = select(x, self.info.sites), context
        values, invalid = self.sweep.begin(inputs, held, keys)
        log_prob = self.posterior.log_density((values, context))
        return values, self._inside(values), log_prob, invalid

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
        """Draw discrete sites where fewer impossible elements of the density are more probable."""
        values, context = inputs
        with self.sweep.joint.program.relaxed():
            for part in self.sweep.discrete:
                moved, _ = part.move((values, context), keys)
                values = {**values, **moved}
        return {site: values[site].astype(v.dtype) for site, v in inputs[0].items()}

    def draw_finite(self, keys: Array) -> SiteArrays:
        """Draw the discrete sites, uniformly from the values of each unit."""
        shapes = select(self.posterior.shapes, self.posterior.values)
        sizes = [math.prod(shape) for shape in shapes.values()]
        # one hash, as each takes some 30 ms to compile
        uniforms = random.uniform(random.words(keys, sum(sizes)))
        parts = jnp.split(uniforms, np.cumsum(sizes)[:-1])
        drawn = {}
        for (site, shape), part in zip(shapes.items(), parts):
            table, valid = self.posterior.values[site]
            tables = np.broadcast_to(table, (len(table), *shape))
            counts = np.broadcast_to(valid, tables.shape).sum(0)
            picked = (part.reshape(shape) * counts).astype(jnp.int32)
            drawn[site] = jnp.take_along_axis(jnp.asarray(tables), picked[None], 0)[0]
        return drawn

    def draw(
        self,
        values: SiteValues,
        arguments: Sequence[Numbers],
        keys: Array,
        strategy: Strategy | None = None,
    ) -> tuple[SiteArrays, list[str]]:
        """Draw the latent sites that are not among the values.

        Continuous sites start as the strategy says, by default where NUTS starts them:
        draws of a vague prior underflow, or are far from the data. Discrete sites are
        uniform, unless the strategy has a value.

        :return: all sites, and the names of the discrete ones that have a given value.
        """
        values = {**self.named, **values}
        held = [site for site in self.posterior.values if site in values]
        fixed = {**self.draw_finite(keys), **values}
        missing = [site for site in self.info.latent if site not in values]
        strategy = strategy or self.strategy
        if not strategy and set(fixed).issuperset(missing):
            return fixed, held
        strategy = strategy or init_to_uniform

        def value_of(site):
            name = site["name"]
            if name not in missing:
                return None
            value = strategy(site)
            if value is not None and name in self.posterior.values:
                held.append(name)
            return value

        trace = self.info.trace(fixed, arguments, random.as_key(keys), value_of)
        drawn = values_in(trace, missing)
        return {**values, **self._cast(drawn)}, held

    def _search(
        self, inputs: tuple[tuple[SiteValues, SiteValues], Context], keys: Array
    ) -> tuple[SiteArrays, Array]:
        """Return values by search, and whether they are possible.

        In the second half siblings are drawn too, as later kernels, such as NUTS, find
        values that fit.
        """
        (fixed_values, values), context = inputs

        def split(x):
            siblings = select(x, context.siblings)
            return select(x, values), context._replace(siblings=siblings)

        def draw(x, keys, is_late):
            drawn, _ = self.draw(fixed_values, context.arguments, keys)
            result = {}
            for site, v in x.items():
                new = drawn[site].astype(v.dtype)
                result[site] = jnp.where(is_late | (site in values), new, v)
            return result

        def sweep(x, keys):
            return {**x, **self.relaxed(split(x), keys), **fixed_values}

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
                    with warnings.catch_warnings(action="ignore"):
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
    """Return a swept state if it is possible, else one that a search finds; and whether that is.

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
        return number + 1, x, is_possible(x) & (place > 0)

    # all mapped by vmap from the start, which then maps the loop once, not three times
    no = keys[0] < 0
    arrays = {site: jnp.where(no, v, v) for site, v in x.items()}
    start = no.astype(jnp.uint32), arrays, no
    _, x, possible = lax.while_loop(is_lost, step, start)
    return x, possible


def named_values(who: str, strategy: Strategy | None) -> dict[str, ArrayLike]:
    """Return the values that ``numpyro.infer.init_to_value`` names, by site.

    :raises ArgumentError: for a strategy that is no function.
    """
    if strategy is not None:
        checks.function(f"{who}: init_strategy", strategy, "a site, as init_to_value")
    if isinstance(strategy, functools.partial) and strategy.func is init_to_value:
        return dict(strategy.keywords["values"])
    return {}


def _over_rows(fn: Callable, once: bool = False) -> Callable:
    """Return a compiled ``fn(inputs, keys)`` of all chains; see :meth:`BlockStart._check`."""

    def in_row(values, mapped, rng_key, fixed):
        return fn((values, _merged(mapped, fixed)), random.key_pair(rng_key))

    def over_rows(values, mapped, rng_keys, fixed):
        if len(rng_keys) > 1:
            return jax.vmap(in_row, (0, 0, 0, None))(values, mapped, rng_keys, fixed)
        # without vmap a program takes half as long to trace
        row = at_index((values, mapped, rng_keys), 0)
        return at_index(in_row(*row, fixed), None)

    # XLA's older emitters compile them in .65 of the time
    return compiled(over_rows, fast_compile=lambda *_: True, once=once)


def _merged(mapped: Context, fixed: Context) -> Context:
    return jax.tree.map(
        lambda a, b: b if a is None else a,
        mapped,
        fixed,
        is_leaf=lambda a: a is None,
    )
