# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""The base of blocks of a Gibbs sampler: NumPyro's contract, and tempered transitions.

A tempered transition heats a chain step by step and cools it again. With L the log
density of a block given everything else, and p_b = exp(b L), the chain goes up from
x_0, x_i drawn by a sweep that leaves p_(b_i) invariant, 1 = b_0 > ... > b_n, and down
again, y_n = x_n, y_(i-1) drawn by the same sweep backward, its reversal. The end y_0 is
accepted with probability

.. math:: \min\Big(1, \exp \sum_{i=0}^{n-1} (b_{i+1} - b_i) (L(x_i) - L(y_i))\Big)

which leaves exp(L) invariant, whatever the b_i are and however badly the sweeps mix. No
state is kept from one transition to the next, so other sites may change in between,
which parallel tempering would not allow.

**References**

1. Neal (1996), *Sampling from multimodal distributions using tempered transitions*,
   section 3.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
import itertools
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, latent_sample_sites, prototype_trace
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density
from numpyro.util import identity

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import SiteArrays, checks, omit, random, select
from ebmpp.errors import StateError
from ebmpp.kernels.base import (
    Kwargs,
    all_still,
    describe_still,
    flags_after,
    is_batched,
)
from ebmpp.moves.couplings import where_rows
from ebmpp.moves.tempering import check_betas
from ebmpp.traced.data import values_in

SiteValues = Mapping[str, Array]
X = TypeVar("X")
#: ``(x, keys, beta, backward)`` to a state and a count.
Sweep = Callable[[X, Array, Any, bool], tuple[X, Array]]
# of the comparison of a model and a block
_NUM_WALKS = 3
_NUM_STATES = 6
_MOST_DRAWS = 50  # from the prior, for a possible state
# folded into the keys of a step
_UP = 1 << 20
_DOWN = 1 << 21
_ACCEPT = 1 << 22


class Call(NamedTuple):
    """A call by NumPyro: values of the sibling sites, and the model's own arguments."""

    siblings: Mapping[str, Array]
    args: tuple
    kwargs: Mapping[str, Any]

    @classmethod
    def split(cls, model_args: tuple, model_kwargs: Kwargs) -> "Call":
        """Take the siblings' values out of the keyword arguments."""
        kwargs = dict(model_kwargs or {})
        return cls(dict(kwargs.pop(GIBBS_SITES_KWARG, {})), model_args, kwargs)

    @property
    def inputs(self) -> tuple[tuple, dict[str, Any]]:
        """The model's arguments and keyword arguments."""
        return self.args, dict(self.kwargs)


#: The sites of one chain, and its call.
BlockChain = tuple[SiteValues, Call]
#: The sites of two chains, and whether a unit's conditional is degenerate.
Coupled = tuple[SiteArrays, SiteArrays, Array]


class BlockState(NamedTuple):
    """The state of a block of a Gibbs sampler.

    - **z** - the sites, with their initial dtypes.
    - **latents** - blocks of a graph that are no site of the model, ``(rows, *shape)``.
    - **i** - number of steps.
    - **accepted** - number of accepted Metropolis proposals of each row, where there is
      a ``log_likelihood``.
    - **degenerate** - number of draws of a model's block that kept a value: its
      conditional was degenerate.
    - **transitions** - number of accepted tempered transitions; 0 without
      ``tempering``.
    - **rng_key** - the block's key. Step ``i`` draws from the key and ``i``, so the key
      does not change.
    - **still** - by site, True while no step has changed it.
    """

    z: SiteArrays
    latents: SiteArrays
    i: Array
    accepted: Array
    degenerate: Array
    transitions: Array
    rng_key: Array
    still: SiteArrays


class Advanced(NamedTuple):
    """The result of a block's step: sites, latents, and increments of the state's counts."""

    z: SiteArrays
    accepted: Array | np.int32 = np.int32(0)
    degenerate: Array | np.int32 = np.int32(0)
    transitions: Array | np.int32 = np.int32(0)


class SiteKernel(MCMCKernel):
    """A kernel of a model's sites; nothing in its state depends on their siblings."""

    sample_field = "z"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an AttributeError, for ``model`` too: NumPyro refuses a block with a None."""
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name == "model":
            message += "; ebmpp.to_datatree(mcmc) converts its draws for ArviZ"
        raise AttributeError(message)

    def refresh(self, state: X, model_args: tuple, model_kwargs: Kwargs) -> X:
        return state

    def get_constrain_fn(self, model_args: tuple, model_kwargs: Kwargs) -> Callable:
        return identity


class Block(SiteKernel):
    """A block of a Gibbs sampler. Subclasses define ``sites`` and ``latents`` too."""

    sites: tuple[str, ...]
    latents: tuple[str, ...]
    tempering: tuple[float, ...] | None

    @abstractmethod
    def advance(
        self,
        values: SiteValues,
        call: Call,
        keys: Array,
        index: Array | None = None,
    ) -> Advanced:
        """Make one step of the sites and latents.

        :param keys: words of this step, ``(2,)``; or the key of all steps, of which
            this is number ``index``.
        """

    @abstractmethod
    def couple(
        self,
        first: BlockChain,
        second: BlockChain,
        keys: Array,
        coupling: str | None = None,
    ) -> Coupled:
        """Make one step of two chains, each unit's two conditionals coupled maximally.

        :param first: the sites of the leading chain, and its call; ``second`` of the
            following one.
        :param keys: words of this step, ``(2,)``.
        """

    @abstractmethod
    def check_coupled(self, coupling: str | None) -> None:
        """Raise an ArgumentError for options, and sites, in which two chains are not coupled."""

    @abstractmethod
    def draw_initial(self, keys: Array) -> SiteArrays:
        """Draw the sites whose prior is an energy, uniformly where that is a distribution."""

    @abstractmethod
    def walk(
        self, values: SiteValues, call: Call, key: Array
    ) -> Iterator[tuple[SiteValues, float]]:
        """Yield random states of the sites, and the block's log density up to a constant."""

    def verify(
        self,
        model: Callable,
        *model_args: object,
        rng_key: Array | None = None,
        tolerance: float = 1e-3,
        **model_kwargs: object,
    ) -> None:
        """Compare how a model's log density and the block's change along random walks of the sites.

        A missing term, one counted twice, or a wrong scale shows at once. A constant
        does not matter.

        :param rng_key: for the random states; a fixed key by default.
        :param tolerance: relative to the size of the changes.
        :raises StateError: where they differ, with the largest difference; for a table
            of a joint draw that does not follow from the traced log density, with its
            units; or for sites that the model lacks.
        :raises IntractableError: for latent blocks that cannot be summed out in closed
            form.
        """
        rng_key = jax.random.key(0) if rng_key is None else rng_key

        @jax.jit
        def density(values):
            return log_density(model, model_args, model_kwargs, values)[0]

        model_call = Call({}, model_args, model_kwargs)
        walks = []
        for number in range(_NUM_WALKS):
            key = jax.random.fold_in(rng_key, number)
            values = _possible_draw(model, model_call, key, density)
            checks.names("latent sample site", self.sites, values, StateError)
            siblings = omit(values, self.sites)
            call = model_call._replace(siblings=siblings)
            states = self.walk(select(values, self.sites), call, key)
            densities = [
                (density({**siblings, **sites}), block_density)
                for sites, block_density in itertools.islice(states, _NUM_STATES)
            ]
            possible = [pair for pair in densities if not np.isneginf(pair).all()]
            walks.append(np.array(possible, float).reshape(-1, 2))
        change, block_change = np.concatenate([np.diff(w, axis=0) for w in walks]).T
        if not len(change):
            raise checks.state_error(
                "verify: states of random walks", "possible, two or more", 0
            )
        largest = np.abs(np.concatenate(walks)[:, 0]).max()
        rounding = 1e-6 * largest / tolerance
        scale = np.abs(change).max() + np.abs(block_change).max() + rounding
        gap = np.abs(change - block_change)
        if not np.isfinite(gap).all() or gap.max() > tolerance * scale:
            worst = np.where(np.isfinite(gap), gap, np.inf).argmax()
            raise StateError(
                f"the block is not the posterior of sites {list(self.sites)}: between "
                f"two states the model's log density changes by {change[worst]:.6g}, "
                f"and the block's by {block_change[worst]:.6g}. Give one factor for "
                "each likelihood that reads the sites, and the energy of their prior "
                "once"
            )

    def sample(
        self, state: BlockState, model_args: tuple, model_kwargs: Kwargs
    ) -> BlockState:
        """Make one step, given the siblings' values in ``model_kwargs``."""
        if state.i.ndim:  # chain_method="vectorized"
            return jax.vmap(lambda s: self.sample(s, model_args, model_kwargs))(state)
        i = state.i + 1
        call = Call.split(model_args, model_kwargs)
        new = self.advance(
            state.z | state.latents, call, state.rng_key, i.astype(jnp.uint32)
        )
        after = state._replace(
            z=select(new.z, self.sites),
            latents=select(new.z, self.latents),
            i=i,
            accepted=state.accepted + new.accepted,
            degenerate=state.degenerate + new.degenerate,
            transitions=state.transitions + new.transitions,
        )
        still = flags_after(after.z, state.z, state.still)
        return after._replace(still=still)

    def _first(self, new: Advanced, rng_key: Array) -> BlockState:
        z = select(new.z, self.sites)
        return BlockState(
            z,
            select(new.z, self.latents),
            *map(jnp.asarray, (np.int32(0), *new[1:])),
            rng_key,
            all_still(z),
        )

    def get_diagnostics_str(self, state: BlockState) -> str:
        """Return the numbers of steps and degenerate draws, acceptance, and unmoved sites."""
        degenerate = int(np.sum(state.degenerate))
        steps = int(np.max(state.i))
        text = f"{steps} steps of {list(self.sites)}"
        if self.tempering is not None:
            share = np.mean(state.transitions) / max(1, steps)
            text += f", tempered transitions accepted {share:.2g}"
        if degenerate:
            text += f", {degenerate} draws kept a value with a degenerate conditional"
        return text + describe_still(state, state.i)


def initial_values(rng_key: Array, init_params: Mapping[str, ArrayLike]) -> SiteArrays:
    """Return initial values of sites, booleans as integers for NumPyro's summary."""
    if is_batched(rng_key):
        raise checks.state_error(
            "GibbsBlock: rng_key",
            "one key",
            rng_key,
            hint='For many chains use chain_method="parallel", "sequential" or jax.vmap.',
        )
    values = {site: jnp.asarray(v) for site, v in init_params.items()}
    return {
        site: v.astype(jnp.int8) if v.dtype == bool else v for site, v in values.items()
    }


def _possible_draw(
    model: Callable,
    call: Call,
    key: Array,
    density: Callable,
) -> SiteArrays:
    """Return the first possible draw of the latent sites from the prior, or the last of all."""
    for number in range(_MOST_DRAWS):
        draw_key = jax.random.fold_in(key, number) if number else key
        trace = prototype_trace(model, draw_key, *call.inputs)
        values = values_in(trace, latent_sample_sites(trace))
        if np.isfinite(density(values)):
            break
    return values


def repeat(count: int, step: Callable[[Array, X], X], state: X) -> X:
    """Apply ``step(i, state)`` ``count`` times, without a loop for a single one."""
    if count == 1:
        return step(jnp.uint32(0), state)
    return lax.fori_loop(jnp.uint32(0), jnp.uint32(count), step, state)


def check_tempering(name: str, betas: Any) -> tuple[float, ...] | None:
    """Return inverse temperatures that increase from more than 0 to 1, or None."""
    return None if betas is None else check_betas(betas, name, positive=True)


def tempered_transition(
    betas: tuple[float, ...],
    log_density: Callable[[X], Array],
    sweep: Sweep,
    x: X,
    keys: Array,
) -> tuple[X, Array, Array]:
    """Make one tempered transition of a state, or of each row of states.

    :param betas: inverse temperatures from the hottest to 1.
    :param sweep: over all units at ``beta``; backward it must be its reversal.
    :param keys: words of this transition, ``(2,)``, or ``(rows, 2)``.
    :return: the state, whether the transition was accepted, and the sum of the sweeps'
        counts.
    """
    path = jnp.asarray(betas[::-1])
    rungs = len(betas) - 1

    def up(i, carry):
        x, gain, count = carry
        gain += (path[i + 1] - path[i]) * log_density(x)
        x, more = sweep(x, random.fold_in(keys, i, _UP), path[i + 1], False)
        return x, gain, count + more

    def down(number, carry):
        x, gain, count = carry
        i = rungs - 1 - number
        x, more = sweep(x, random.fold_in(keys, i, _DOWN), path[i + 1], True)
        gain -= (path[i + 1] - path[i]) * log_density(x)
        return x, gain, count + more

    gain = jnp.zeros_like(log_density(x))
    _, of_sweep = jax.eval_shape(lambda x: sweep(x, keys, path[1], False), x)
    count = jnp.zeros_like(of_sweep)
    hot = lax.fori_loop(0, rungs, up, (x, gain, count))
    new, gain, count = lax.fori_loop(0, rungs, down, hot)
    words = random.words(random.fold_in(keys, 0, _ACCEPT), 1)
    accepted = jnp.log(random.uniform(words[..., 0])) < gain
    x = jax.tree.map(lambda a, b: where_rows(accepted, a, b), new, x)
    return x, accepted, count
