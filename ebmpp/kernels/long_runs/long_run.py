# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""``LongRun``: MCMC whose draws are not kept in memory."""

from collections.abc import Callable, Sequence
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpyro.infer.mcmc import MCMC

from jax import Array

from ebmpp.core import checks
from ebmpp.errors import ArgumentError
from ebmpp.kernels.long_runs.chains import take
from ebmpp.kernels.long_runs.runner import Runner
from ebmpp.kernels.long_runs.totals import Moments

if TYPE_CHECKING:
    import xarray as xr


@dataclasses.dataclass(frozen=True)
class LongDraws:
    """What :meth:`LongRun.run` returns. :func:`ebmpp.to_datatree` makes a tree of it.

    :param mcmc: what ran.
    :param moments: of ``fn``.
    :param fields: moments of the kernel's default fields but the draws, and of extra fields, by name.
    :param covariance: the matrix of all numbers of ``covariance``, in its order; or None.
    :param folded: what the fold carries after the last draw, with a leading axis of chains; or None.
    :param num_draws: of each chain, after warm-up; all of them count.
    :param num_kept: of each chain, in files.
    :param directory: where these are.
    :param last_state: the kernel's, as ``mcmc.last_state``; with ``mcmc.post_warmup_state = made.last_state``
        another run goes on there.
    """

    mcmc: MCMC
    moments: Moments
    fields: dict[str, Moments]
    covariance: np.ndarray | None
    folded: Any
    num_draws: int
    num_kept: int
    directory: str | os.PathLike[str] | None
    last_state: Any

    def draws(self) -> "xr.DataTree":
        """Those that were kept: groups ``posterior`` and ``sample_stats``, none of it in memory.

        A selection reads the files that it needs: ``made.draws().posterior["v"][0, -100:].values``.

        :raises ArgumentError: where none were kept.
        :raises CheckpointError: where a file is missing or damaged.
        """
        if self.directory is None or not self.num_kept:
            raise ArgumentError("this run kept no draws: give LongRun(..., keep=True, directory=...)")
        from ebmpp.kernels.long_runs import reading  # xarray, with pandas, takes more than a second

        return reading.opened(Path(self.directory), self.num_kept)

    def __repr__(self) -> str:
        kernel, kept = type(self.mcmc.sampler).__name__, f", {self.num_kept} kept" if self.num_kept else ""
        return f"LongDraws({self.mcmc.num_chains} chains of {kernel}, {self.num_draws} draws each{kept})"


def _everything(draw: Any) -> Any:
    return draw


@dataclasses.dataclass(frozen=True)
class LongRun:
    """A run of NumPyro's ``MCMC`` of any length: moments are kept as it goes, and draws, if at all, in files.

    It takes an ``MCMC``, makes the steps that ``mcmc.run`` would make with the same arguments, under the same
    chain method, and keeps none of them in memory: what a run takes does not grow with ``num_samples``.
    Kept are the moments of every step after the warm-up (sums of a batch in jax's floats, batch after batch
    in 64 bits), so ``mcmc.thinning`` concerns files alone. Any kernel of NumPyro's contract will do: those of
    :mod:`ebmpp.kernels` and :mod:`ebmpp.ppl`, ``numpyro.infer.Gibbs`` of them, ``NUTS``. Of real values the
    draws agree with those of ``mcmc.run`` to rounding, which ``NUTS`` amplifies as it goes.

    With a ``directory`` the run can be stopped, by whatever it is, and goes on where its last checkpoint was:
    moments, draws and states are bitwise those of a run that was never stopped, on the same machine with the
    same versions. It may also be called anew with a larger ``num_samples``.

    :param mcmc: its kernel, numbers, chain method, ``postprocess_fn`` and progress bar count; it is not run.
    :param fn: of one chain's draw (a dict of sites, as ``get_samples`` has them) to numbers: an array or a
        tree of them, such as indicators or squares. The draw itself unless given.
    :param covariance: of a draw to numbers, all of whose covariances are kept; so they should be few.
    :param fold: ``(start, step)``: ``step(carry, draw)`` returns the next carry, and ``start`` is the first:
        whatever a chain's draws add up to that is no mean, such as a maximum.
    :param batch_length: of the batch means, in steps, whole batches only; the square root of ``num_samples``
        unless given.
    :param directory: where checkpoints and draws are kept; made if it is not there. Other files there are let
        alone.
    :param keep: whether every ``mcmc.thinning``-th draw is written there, with the fields: True, or names of
        sites. Files are netCDF and open in ArviZ one by one, and together by :meth:`LongDraws.draws`.
    :param every: steps between checkpoints, the warm-up's included; a file of draws each.
    :param resume: go on where the run in ``directory`` stopped, or begin where there is none.
    :raises ArgumentError: for numbers out of range, what is no function, or no MCMC; where draws are to be
        kept and there is no directory, or ``num_samples`` is no multiple of ``thinning``.

    **References**

    1. Chan, Golub, LeVeque (1983), *Algorithms for computing the sample variance*: sums of batches.
    2. Flegal, Jones (2010), *Batch means and spectral variance estimators in Markov chain Monte Carlo*:
       batches as long as the square root of the run.

    **Example**

    >>> import jax, tempfile, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(ebmpp.BlockedGibbs(rbm), num_warmup=10, num_samples=500, num_chains=20, thinning=50,
    ...             chain_method="vectorized", progress_bar=False)
    >>> long = ebmpp.kernels.LongRun(mcmc, directory=tempfile.mkdtemp(), keep=["v"], every=200)
    >>> made = long.run(jax.random.key(1), {"v": jax.numpy.zeros(4), "h": jax.numpy.zeros(3),
    ...                                     "v:h": jax.numpy.zeros((4, 3))})
    >>> made.moments.mean["v"].round(1).tolist()
    [0.5, 0.5, 0.5, 0.5]
    >>> bool((made.moments.r_hat["h"] < 1.01).all())
    True
    >>> made.draws().posterior["v"].shape
    (20, 10, 4)
    """

    mcmc: MCMC
    fn: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    covariance: Callable[..., Any] | None = None
    fold: tuple[Any, Callable[..., Any]] | None = None
    batch_length: int | None = None
    directory: str | os.PathLike[str] | None = None
    keep: bool | Sequence[str] = False
    every: int = 1000
    resume: bool = False

    def __post_init__(self) -> None:
        checks.instance("LongRun: mcmc", self.mcmc, MCMC, "a numpyro.infer.MCMC")
        for name, given in {"fn": self.fn, "covariance": self.covariance}.items():
            if given is not None:
                checks.function(f"LongRun: {name}", given, "a draw", arguments=1)
        if self.fold is not None:
            if not isinstance(self.fold, tuple) or len(self.fold) != 2:
                raise ArgumentError(f"LongRun: fold is a pair (start, step), not {checks.tell(self.fold)}")
            checks.function("LongRun: the step of fold", self.fold[1], "a carry and a draw", arguments=2)
        checks.set_counts(self, "batch_length", optional=True)
        checks.set_counts(self, "every")
        checks.flag("LongRun: resume", self.resume)
        self._check_files()

    def _check_files(self) -> None:
        if not isinstance(self.keep, bool):
            keep = checks.sequence("LongRun: keep", self.keep, "names of sites, or True or False")
            object.__setattr__(self, "keep", tuple(keep))
        if self.directory is None and (self.keep or self.resume):
            named = "keep" if self.keep else "resume"
            raise ArgumentError(
                f"LongRun: {named} is about files: give directory, where they are; without one nothing but "
                "moments is kept"
            )
        num, thinning = self.mcmc.num_samples, self.mcmc.thinning
        if self.keep and num % thinning:
            raise ArgumentError(
                f"LongRun: MCMC's num_samples {num} is no multiple of its thinning {thinning}, so which "
                f"draws are kept would depend on where the run ends: give {num - num % thinning}"
            )

    def run(
        self,
        rng_key: Array,
        *args: Any,
        extra_fields: Sequence[str] = (),
        init_params: Any = None,
        **kwargs: Any,
    ) -> LongDraws:
        """As ``mcmc.run``, which see for the arguments; nothing is left on ``mcmc``.

        A ``mcmc.post_warmup_state`` that is set is where chains start, as there.

        Arrays among the model's arguments are arguments of the compiled program, too: other values compile
        nothing. A model whose Python looks at their values is compiled for them.

        :param extra_fields: names of fields of the kernel's state, with dots for what is inside: their
            moments are kept, and their values where draws are.
        :raises ArgumentError: for keys or initial values of another number than chains, or unknown fields.
        :raises CheckpointError: for a directory of another run, in use, damaged, or holding checkpoints
            without ``resume``; for a disk that fails.
        """
        fields = tuple(checks.sequence("LongRun: extra_fields", extra_fields, "names of fields"))
        runner = Runner(self, self.fn or _everything, rng_key, args, kwargs, fields, init_params)
        ended, plan = runner.run(), runner.plan
        tree, covariance = ended.totals.moments(ended.chains.sums, ended.open)
        state = ended.chains.state
        return LongDraws(
            self.mcmc,
            Moments.of(tree["fn"]),
            {name: Moments.of(tree["fields"][name]) for name in plan.fields},
            covariance,
            None if plan.fold is None else ended.chains.sums.carry,
            self.mcmc.num_samples,
            self.mcmc.num_samples // plan.thinning if plan.keep else 0,
            self.directory,
            take(state, 0) if plan.num_chains == 1 else state,
        )
