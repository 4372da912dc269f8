# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""MCMC runs of any length in constant memory, resumable."""

from collections.abc import Callable, Sequence
import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import PyTree
import numpy as np
from numpyro.infer.mcmc import MCMC
from numpyro.util import identity
from tqdm.auto import tqdm

import jax
from jax import Array

from ebmpp.core import archive, checkpoints, checks
from ebmpp.kernels.base import InitParams
from ebmpp.kernels.streaming import Chunks, Moments, Totals

if TYPE_CHECKING:
    import xarray as xr


@dataclasses.dataclass(frozen=True)
class LongDraws:
    """Result of :meth:`LongRun.run`; :func:`ebmpp.to_datatree` converts it.

    :param mcmc: the MCMC that was continued.
    :param moments: of ``fn``.
    :param fields: moments of the kernel's default and extra fields, by name.
    :param num_draws: draws of each chain after the warm-up, all of which count.
    :param num_kept: draws of each chain in the file.
    :param directory: where the file is.
    :param last_state: the kernel's, as ``mcmc.last_state``; with
        ``mcmc.post_warmup_state = result.last_state`` another run continues there.
    """

    mcmc: MCMC
    moments: Moments
    fields: dict[str, Moments]
    num_draws: int
    num_kept: int
    directory: str | os.PathLike[str] | None
    last_state: Any

    def draws(self) -> "xr.DataTree":
        """Open the file ``draws.nc`` of the directory: groups ``posterior`` and ``sample_stats``.

        Values are read when they are selected:
        ``result.draws().posterior["v"][0, -100:].values``.

        :raises ArgumentError: if no draws were kept.
        """
        if self.directory is None or not self.num_kept:
            raise checks.error("LongRun: keep", "set for draws", False)
        import xarray  # takes more than a second, with pandas

        return xarray.open_datatree(Path(self.directory, "draws.nc"), engine="h5netcdf")

    def __repr__(self) -> str:
        kernel = type(self.mcmc.sampler).__name__
        count = f", {self.num_kept} kept" if self.num_kept else ""
        return (
            f"LongDraws({self.mcmc.num_chains} chains of {kernel}, {self.num_draws} "
            f"draws each{count})"
        )


class _Record(checkpoints.Checkpoints):
    """Checkpoints of a long run."""

    kind = archive.Kind("ebmpp long run", 5, "LongRun")
    function = "LongRun"
    argument = "directory"
    total = "MCMC's num_samples"
    compiled = ("code of one step and of fn",)


@dataclasses.dataclass(frozen=True)
class LongRun:
    """MCMC run of any length: moments are accumulated, and draws are kept in a file or not at all.

    It makes the steps of ``mcmc.run`` with the same arguments and chain method, in
    chunks; real-valued draws agree with it to rounding, which NUTS amplifies. Any
    NumPyro kernel will do. Every step after the warm-up counts in the moments:
    ``mcmc.thinning`` concerns the file alone.

    With a ``directory`` a run that was stopped or killed continues at its last
    checkpoint, with bitwise the moments and draws of an uninterrupted run (on the same
    machine, with the same versions). It may be called again with a larger
    ``num_samples``. Another model, kernel or ``fn`` is refused: the compiled code of
    one step, its constants and the arguments are compared.

    :param mcmc: kernel, numbers, chain method, ``postprocess_fn`` and progress bar of
        the run.
    :param fn: from one chain's draw (a dict of sites, as in ``get_samples``) to
        numbers: an array or a tree of arrays, such as indicators, or products for
        covariances. Default: the draw itself.
    :param batch_length: steps of a batch, for errors by batch means, and between two
        returns to Python. Default: the square root of ``num_samples``, and a multiple
        of the thinning.
    :param directory: where checkpoints and draws are stored; created if it does not
        exist.
    :param keep: store every ``mcmc.thinning``-th draw there, with the fields: True, or
        names of sites. The netCDF file ``draws.nc`` opens in xarray and ArviZ.
    :param checkpoint_every: steps after which the next whole batch is followed by a
        checkpoint.
    :param resume: continue the run in ``directory``, if there is one.
    :raises ArgumentError: for numbers out of range; if draws are kept and there is no
        directory, or ``num_samples`` or ``batch_length`` is no multiple of
        ``thinning``.

    **References**

    1. Chan, Golub, LeVeque (1983), *Algorithms for computing the sample variance*:
       merging of batches.
    2. Flegal, Jones (2010), *Batch means and spectral variance estimators in Markov
       chain Monte Carlo*: batches as long as the square root of the run.

    **Example**

    >>> import jax, tempfile, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(ebmpp.BlockedGibbs(rbm), num_warmup=10, num_samples=500, num_chains=20,
    ...             thinning=50, chain_method="vectorized", progress_bar=False)
    >>> long = ebmpp.kernels.LongRun(mcmc, directory=tempfile.mkdtemp(), keep=["v"],
    ...                              checkpoint_every=200)
    >>> result = long.run(jax.random.key(1), {"v": jax.numpy.zeros(4), "h": jax.numpy.zeros(3),
    ...                                       "v:h": jax.numpy.zeros((4, 3))})
    >>> result.moments.mean["v"].round(1).tolist()
    [0.5, 0.5, 0.5, 0.5]
    >>> bool((result.moments.r_hat["h"] < 1.01).all())
    True
    >>> result.draws().posterior["v"].shape
    (20, 10, 4)
    """

    mcmc: MCMC
    fn: Callable[..., PyTree] | None = None
    _: dataclasses.KW_ONLY
    batch_length: int | None = None
    directory: str | os.PathLike[str] | None = None
    keep: bool | Sequence[str] = False
    checkpoint_every: int = 1000
    resume: bool = False

    def __post_init__(self) -> None:
        checks.instance("LongRun: mcmc", self.mcmc, MCMC, "a numpyro.infer.MCMC")
        if self.fn is not None:
            checks.function("LongRun: fn", self.fn, "a draw", arguments=1)
        checks.set_counts(self, "batch_length", optional=True)
        checks.set_counts(self, "checkpoint_every")
        if not isinstance(self.keep, bool):
            keep = checks.sequence(
                "LongRun: keep", self.keep, "names of sites, or True or False"
            )
            object.__setattr__(self, "keep", tuple(keep))
        if self.directory is None and (self.keep or self.resume):
            raise checks.error(
                "LongRun: directory", "a directory for keep and resume", None
            )
        thinning = self.mcmc.thinning if self.keep else 1
        lengths = {
            "num_samples": self.mcmc.num_samples,
            "batch_length": self.batch_length or 0,
        }
        for name, value in lengths.items():
            if value % thinning != 0:
                raise checks.error(
                    f"LongRun: {name}",
                    f"a multiple of MCMC's thinning {thinning}",
                    value,
                )

    def run(
        self,
        rng_key: Array,
        *args: object,
        extra_fields: Sequence[str] = (),
        init_params: InitParams = None,
        **kwargs: object,
    ) -> LongDraws:
        """Run or continue, with the arguments of ``mcmc.run``; ``mcmc`` itself is left as it was.

        Chains start at ``mcmc.post_warmup_state``, if it is set.

        :param extra_fields: names of fields of the kernel's state, with dots for nested
            ones. Their moments are accumulated, and their values are stored where draws
            are.
        :raises ArgumentError: if the number of keys is not that of the chains, or a
            field is unknown.
        :raises CheckpointError: if the directory is another run's, in use, damaged,
            holds checkpoints and ``resume`` is not set, or cannot be written.
        """
        mcmc = self.mcmc
        kernel = mcmc.sampler
        extra_fields = checks.sequence(
            "LongRun: extra_fields", extra_fields, "names of fields"
        )
        names = dict.fromkeys((*kernel.default_fields, *extra_fields))
        fields = tuple(name for name in names if name != kernel.sample_field)
        chunks = Chunks(
            mcmc,
            self.fn or identity,
            fields,
            self.keep,
            args,
            kwargs,
            rng_key,
            init_params,
        )
        if self.directory is None:
            return self._run(chunks, None)
        inputs = rng_key, args, kwargs, init_params, mcmc.post_warmup_state
        record = _Record(self.directory, self._identity(chunks, inputs), self.resume)
        try:
            with record.disk_errors("cannot be written"):
                return self._run(chunks, record)
        finally:
            record.close()

    def _run(self, chunks: Chunks, record: _Record | None) -> LongDraws:
        mcmc = self.mcmc
        total = mcmc.num_samples
        thinning = mcmc.thinning if self.keep else 1
        saved = None if record is None else record.read(depth=4)
        done = 0 if saved is None else saved.step
        file = None
        if record is not None:
            record.check_length(record.directory, done, total)
            if self.keep:
                # h5py is for those who keep draws
                from ebmpp.kernels.draw_file import DrawFile

                file = DrawFile(record.directory, total // thinning, done // thinning)
        if saved is None:
            chunks.begin(None)
            length = self.batch_length or -(-math.isqrt(total) // thinning) * thinning
            totals = Totals.empty(length, *chunks.moments().mean.shape)
        else:
            chunks.begin(saved.arrays[3:])
            totals = Totals(*saved.body["batches"], *saved.arrays[:3])
            length = totals.length
        is_hidden = not mcmc.progress_bar
        with tqdm(total=total, initial=done, disable=is_hidden, unit="step") as bar:
            while done < total:
                stop = min(total, done + length - done % length)
                draws = chunks.run(stop - done, thinning)
                if file is not None:
                    file.write(done // thinning, draws)
                if stop % length == 0:
                    totals = totals.add(chunks.moments(), length)
                    chunks.reset()
                interval = self.checkpoint_every
                is_due = stop == total or stop // interval > done // interval
                if record is not None and is_due:
                    arrays = [*totals[2:], *chunks.arrays()]
                    record.write(stop, {"batches": totals[:2]}, arrays)
                bar.update(stop - done)
                done = stop
        if file is not None:
            file.finish()
        moments = totals.moments(chunks.moments(), total % length).map(chunks.unravel)
        of_fn = moments.map(lambda tree: tree["fn"])
        num_kept = total // thinning if self.keep else 0
        by_field = {
            name: moments.map(lambda tree, name=name: tree["fields"][name])
            for name in chunks.fields
        }
        return LongDraws(
            mcmc, of_fn, by_field, total, num_kept, self.directory, chunks.state
        )

    def _identity(self, chunks: Chunks, inputs: PyTree) -> dict[str, object]:
        """Return what all calls of one run have in common."""
        mcmc = self.mcmc
        method = mcmc.chain_method
        return {
            "versions": checkpoints.versions(),
            "kernel": type(mcmc.sampler).__name__,
            "fields": list(chunks.fields),
            "keep": self.keep,
            "batch_length": self.batch_length,
            "chain_method": method if isinstance(method, str) else "callable",
            "num_warmup": mcmc.num_warmup,
            "num_chains": mcmc.num_chains,
            "thinning": mcmc.thinning,
            "rng_key and arguments": _digest(inputs),
            "code of one step and of fn": chunks.code(),
        }


def _digest(tree: PyTree) -> str:
    """Hash arrays and strings of a tree, with their paths; others count by their types."""
    values = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = checkpoints.as_numbers(leaf) if isinstance(leaf, Array) else leaf
        is_plain = isinstance(
            value, Array | np.ndarray | np.generic | int | float | str
        )
        if not is_plain or np.asarray(value).dtype == object:
            value = type(leaf).__name__
        values[jax.tree_util.keystr(path)] = value
    return archive.digest(values)
