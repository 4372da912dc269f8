# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One long run: chains from checkpoint to checkpoint."""

from collections.abc import Callable, Mapping
import math
from pathlib import Path
import time
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpyro.infer.mcmc import MCMC
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.errors import ArgumentError, CheckpointError
from ebmpp.kernels.base import is_batched
from ebmpp.kernels.long_runs import chains as moving, drawn
from ebmpp.kernels.long_runs.chains import Arguments, Chains, Plan, Setup
from ebmpp.kernels.long_runs.record import Record, draws_of, identity, restored
from ebmpp.kernels.long_runs.totals import Totals

_PACE = 0.3  # seconds that a call should take: what the progress bar and an interrupt wait for
_WARMUP = -(2**30)  # a place in no batch


class Options(Protocol):
    """Those of a ``LongRun``."""

    @property
    def mcmc(self) -> MCMC: ...
    @property
    def covariance(self) -> Callable[..., Any] | None: ...
    @property
    def fold(self) -> tuple[Any, Callable[..., Any]] | None: ...
    @property
    def batch_length(self) -> int | None: ...
    @property
    def directory(self) -> Any: ...
    @property
    def keep(self) -> Any: ...
    @property
    def every(self) -> int: ...
    @property
    def resume(self) -> bool: ...


class Ended(NamedTuple):
    """A run that is done."""

    chains: Chains
    totals: Totals
    open: int
    """Draws after the last whole batch."""


class Runner:
    """A run: what is compiled, what it is given, where it stands.

    :param options: what was asked for.
    :param fn: of a draw.
    :param rng_key: one key, or one a chain.
    :param args: the model's.
    :param kwargs: likewise.
    :param extra_fields: of the state.
    :param init_params: as MCMC takes them.
    """

    def __init__(
        self,
        options: Options,
        fn: Callable[..., Any],
        rng_key: Array,
        args: tuple,
        kwargs: Mapping[str, Any],
        extra_fields: tuple[str, ...],
        init_params: Any,
    ) -> None:
        mcmc, self.options = options.mcmc, options
        self.length = options.batch_length or max(1, math.isqrt(mcmc.num_samples))
        keys = _keys(rng_key, mcmc.num_chains)
        setup = Setup(keys, _initial_values(init_params, mcmc.num_chains), [])
        self.plan = self._plan(fn, extra_fields)
        state, kernel = moving.initial(self.plan, setup, args, kwargs)
        self.warmup = mcmc.num_warmup
        given = {"rng_key": setup.keys, "arguments": (args, kwargs), "init_params": init_params}
        if mcmc.post_warmup_state is not None:
            state, self.warmup = _warm(mcmc, keys), 0
            given["post_warmup_state"] = mcmc.post_warmup_state
        self.total = self.warmup + mcmc.num_samples
        look, self.rest = self._outline(state, setup, args, kwargs)
        self.setup = setup._replace(arrays=self.rest.arrays)
        start = None if options.fold is None else options.fold[0]
        self.chains = moving.start(self.plan, state, look, start)
        # hashes of all that is given: for files alone
        self.told = {} if options.directory is None else identity(mcmc, self.plan, kernel, given)

    def _plan(self, fn: Callable[..., Any], extra_fields: tuple[str, ...]) -> Plan:
        options, mcmc = self.options, self.options.mcmc
        kernel = mcmc.sampler
        fields = [name for name in (*kernel.default_fields, *extra_fields) if name != kernel.sample_field]
        removed = [name for name in fields if name.startswith("~")]
        if removed:
            raise ArgumentError(
                f"LongRun: extra_fields has {removed[0]!r}; fn says whose moments are kept, and keep which "
                "sites are written"
            )
        fold = None if options.fold is None else options.fold[1]
        self.most = min(self.length, options.every)
        return Plan(
            kernel=kernel,
            method=mcmc.chain_method,
            num_chains=mcmc.num_chains,
            num_warmup=mcmc.num_warmup,
            postprocess=mcmc.postprocess_fn,
            fn=fn,
            covariance=options.covariance,
            fold=fold,
            fields=tuple(dict.fromkeys(fields)),
            keep=options.keep,
            thinning=mcmc.thinning,
            capacity=-(-self.most // mcmc.thinning) if options.keep else 0,
        )

    def _outline(
        self, state: Any, setup: Setup, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[moving.Look, Arguments]:
        """Shapes of what is seen; and the model's arguments, as the program takes them."""
        rest = Arguments(args, kwargs)
        try:
            return moving.outline(self.plan, rest, state, setup._replace(arrays=rest.arrays)), rest
        except Exception:  # a model whose Python looks at values; if it is not that, the same comes again
            if not rest.arrays:
                raise
        rest = Arguments(args, kwargs, constant=True)
        return moving.outline(self.plan, rest, state, setup), rest

    # -- files -----------------------------------------------------------------------------------

    def run(self) -> Ended:
        """All steps that are not done yet."""
        options = self.options
        if options.directory is None:
            return self._advance(0, Totals.empty(self.length, self.chains.sums), None)
        record = Record(options.directory, self.told, options.resume)
        try:
            found = record.read(depth=4)
            step = 0 if found is None else found.step
            if found is not None:
                record.check_length(step, self.total)
                self._check_batches(record.directory, found.told["batch"])
            totals = Totals.empty(self.length, self.chains.sums)
            if found is not None:
                self.chains = moving.placed(self.plan, restored(found, self.chains, totals))
            if self.plan.keep:
                drawn.clean(record.directory, self._kept(step))
                drawn.check(record.directory, self._kept(step))
            return self._advance(step, totals, record)
        finally:
            record.close()

    def _check_batches(self, directory: Path, there: int) -> None:
        """A run that is called anew with more draws has the batches that it had."""
        if self.options.batch_length not in (None, there):
            raise CheckpointError(
                f"{directory} holds a run of batch_length {there}, and this one has {self.length}: give "
                f"batch_length={there} or none, or another directory"
            )
        self.length = there

    def _kept(self, step: int) -> int:
        """Draws of each chain that are written by then."""
        return max(0, step - self.warmup) // self.plan.thinning if self.plan.keep else 0

    def _save(self, record: Record, step: int, totals: Totals, pending: list[drawn.Groups]) -> None:
        """:raises CheckpointError: where it cannot be written."""
        try:
            if pending:
                groups = {g: _joined([part[g] for part in pending]) for g in pending[0]}
                written = next(iter(groups["posterior"].values())).shape[1]
                drawn.write(record.directory, self._kept(step) - written, groups)
            record.save(step, self._kept(step), self.chains, totals)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {step} cannot be written in {record.directory}: {error}. Mend the disk, and "
                "resume=True goes on from the checkpoint before"
            ) from error

    # -- steps -----------------------------------------------------------------------------------

    def _advance(self, step: int, totals: Totals, record: Record | None) -> Ended:
        pending: list[drawn.Groups] = []
        pace = 1
        shown = self.options.mcmc.progress_bar
        with tqdm(total=self.total, initial=step, disable=not shown, unit="step") as bar:
            while step < self.total:
                begun = time.monotonic()
                stop = min(step + pace, self._stop(step, record is not None))
                self._steps(step, stop)
                if self._kept(stop) > self._kept(step):
                    pending.append(draws_of(self.chains, self.plan, self._kept(stop) - self._kept(step)))
                if stop > self.warmup and (stop - self.warmup) % self.length == 0:
                    totals.add(self.chains.sums)
                if record is not None and (stop % self.options.every == 0 or stop == self.total):
                    self._save(record, stop, totals, pending)
                    pending = []
                self._show(bar, step, stop)
                took, step = time.monotonic() - begun, stop
                pace = 2 * pace if took < _PACE / 2 else max(1, pace // 2) if took > 2 * _PACE else pace
        return Ended(self.chains, totals, (self.total - self.warmup) % self.length)

    def _stop(self, step: int, saving: bool) -> int:
        """Before which step something is to be done."""
        ends = [self.total, step + self.most]  # there is no room for draws of more
        if saving:
            ends.append(step + self.options.every - step % self.options.every)
        if step < self.warmup:
            return min(*ends, self.warmup)
        return min(*ends, step + self.length - (step - self.warmup) % self.length)

    def _steps(self, step: int, stop: int) -> None:
        done = step - self.warmup
        at, phase = (done % self.length, done % self.plan.thinning) if done >= 0 else (_WARMUP, 0)
        self.chains = moving.advance(self.plan, self.rest, self.chains, self.setup, at, phase, stop - step)
        jax.block_until_ready(self.chains.sums)

    def _show(self, bar: tqdm, step: int, stop: int) -> None:
        if not bar.disable:
            bar.set_description("warmup" if step < self.warmup else "sample", refresh=False)
            if self.plan.num_chains == 1:
                state = moving.take(self.chains.state, 0)
                bar.set_postfix_str(self.plan.kernel.get_diagnostics_str(state), refresh=False)
        bar.update(stop - step)


def _keys(rng_key: Any, num_chains: int) -> Array:
    """One a chain, those that MCMC would make.

    :raises ArgumentError: for another number of keys.
    """
    if not is_batched(rng_key):
        return jax.random.split(rng_key, num_chains) if num_chains > 1 else jnp.asarray(rng_key)[None]
    if len(rng_key) != num_chains:
        raise ArgumentError(f"LongRun: rng_key is one key, or {num_chains}, one a chain, not {len(rng_key)}")
    return jnp.asarray(rng_key)


def _initial_values(given: Any, num_chains: int) -> Any:
    """With a leading axis of chains, which MCMC takes where there are several.

    :raises ArgumentError: where it has another length.
    """
    if num_chains == 1:
        return jax.tree.map(lambda a: jnp.asarray(a)[None], given)
    for leaf in jax.tree.leaves(given):
        if jnp.shape(leaf)[:1] != (num_chains,):
            raise ArgumentError(
                f"LongRun: init_params has an array of shape {jnp.shape(leaf)}, and the first axis is that "
                f"of the {num_chains} chains"
            )
    return jax.tree.map(jnp.asarray, given)


def _warm(mcmc: MCMC, keys: Array) -> Any:
    """MCMC's state after the warm-up, with this run's keys."""
    state = mcmc.post_warmup_state
    if mcmc.num_chains == 1:
        state = jax.tree.map(lambda a: a[None], state)
    return state._replace(rng_key=keys[0] if mcmc.sampler.is_ensemble_kernel else keys)


def _joined(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Draws one after another."""
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
