# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Thermodynamics of the ladder of a tempered run: energies, heat capacities, log Z."""

import warnings

from jaxtyping import Float
import numpy as np
from numpyro.infer import MCMC
from scipy.special import expit
import xarray as xr

from ebmpp.annealing.reference import log_partition
from ebmpp.core import checks
from ebmpp.kernels import ParallelTempering
from ebmpp.kernels.base import MIN_ACCEPTANCE
from ebmpp.moves.rungs import evaluate, reference_of

_BLOCKS = 20  # of successive draws, one of which the jackknife leaves out
_ITERATIONS = 50
_NAMES = ("energy", "heat_capacity", "log_partition")


def ladder(mcmc: MCMC) -> xr.Dataset:
    r"""Return energies, heat capacities and log Z along the ladder of a tempered run.

    At the inverse temperature :math:`\beta` the density is proportional to
    :math:`e^{-E_0 - \beta U}`, where U is the energy of the interactions (of factors of
    several blocks or units) and E_0 that of the others. Neighbouring rungs with draws
    u of U, :math:`\delta = \beta_{r+1} - \beta_r` and :math:`s(x) = 1 / (1 + e^{-x})`
    give the ratio :math:`\Delta` of their log Z by Bennett's equation

    .. math::

        \sum_{u \sim r} s(-\delta u - \Delta)
        = \sum_{u \sim r + 1} s(\Delta + \delta u),

    solved by 50 steps of the fixed-point iteration of Meng and Wong.

    Errors are by a jackknife over 20 blocks of successive draws. They hold where
    blocks are longer than the autocorrelation time; compare chains. Each chain has a
    ladder of its own.

    :param mcmc: of :class:`~ebmpp.ParallelTempering` without a path, with one parameter
        set, no clamped blocks and a ladder from 0, after
        ``run(key, params, extra_fields=("replicas",))``.
    :return: over ``chain`` and ``rung``, from hot to cold: ``beta``, ``energy`` (the
        mean of U), ``heat_capacity`` (:math:`\beta^2` times its variance) and
        ``log_partition``, log Z, the last three with ``_error``; and over ``chain`` and
        ``pair``, the ``acceptance`` of swaps of rungs ``pair`` and ``pair + 1``.
    :raises ArgumentError: for another run.
    :warns UserWarning: naming the rungs that accept the fewest swaps, if these are less
        than 5 %.

    **References**

    1. Bennett (1976), *Efficient estimation of free energy differences from Monte Carlo
       data*, equation 12.
    2. Meng, Wong (1996), *Simulating ratios of normalizing constants via a simple
       identity*: the same as optimal bridge.

    **Example**

    >>> import jax, ebmpp
    >>> magnet = ebmpp.layered(v=ebmpp.Spin(4), h=ebmpp.Spin(4))
    >>> params = {"v": jax.numpy.full(4, 0.1), "h": jax.numpy.zeros(4)}
    >>> params["v:h"] = jax.numpy.ones((4, 4))
    >>> mcmc = MCMC(ParallelTempering(magnet, num_temperatures=4), num_warmup=63,
    ...             num_samples=2000, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), params, extra_fields=("replicas",))
    >>> log_z = ladder(mcmc)["log_partition"].values[0, -1]
    >>> bool(abs(log_z - ebmpp.exact.log_partition(magnet, params)) < 0.1)
    True
    """
    kernel = mcmc.sampler
    state = mcmc.last_state
    replicas = mcmc.get_extra_fields(group_by_chain=True).get("replicas")
    is_tempered = isinstance(kernel, ParallelTempering) and state.knots is None
    if not is_tempered or replicas is None or mcmc._kwargs or state.betas[..., 0].any():
        expected = "of ParallelTempering from 0, with replicas and nothing clamped"
        raise checks.error("ladder: mcmc", expected, kernel)
    target = kernel.target(mcmc._args, {}, check=False)
    graph = target.graph
    reference = reference_of(graph, target.params)
    x = {b: v.reshape(-1, *target.shape(b)) for b, v in replicas.items()}
    at = evaluate(graph, target.params, reference, x, ())
    betas = np.asarray(state.betas, float).reshape(mcmc.num_chains, -1)
    energies = np.asarray(at.reference - at.model, float)
    energies = energies.reshape(len(betas), -1, betas.shape[1]).swapaxes(1, 2)
    values = _estimates(energies, betas)
    values[2] += log_partition(graph, reference)
    blocks = np.array_split(np.arange(energies.shape[-1]), _BLOCKS)
    others = [_estimates(np.delete(energies, b, -1), betas) for b in blocks]
    errors = np.sqrt(_BLOCKS - 1) * np.std(others, 0)
    dims = ("chain", "rung")
    columns = {"beta": (dims, betas)}
    for name, value, error in zip(_NAMES, values, errors):
        columns[name] = (dims, value)
        columns[f"{name}_error"] = (dims, error)
    acceptance = 1 - np.asarray(state.rejection, float).reshape(len(betas), -1)
    columns["acceptance"] = (("chain", "pair"), acceptance)
    share = acceptance.mean(0)
    r = int(share.argmin())
    # Bennett's equation needs less: errors held down to 0.0005 (200 chains of 400
    # independent draws). But cold rungs then visit the modes in which they started.
    if share[r] < MIN_ACCEPTANCE:
        low, high = betas[:, r : r + 2].mean(0)
        warnings.warn(
            f"ladder: rungs {r} and {r + 1}, at beta {low:.3g} and {high:.3g}, accept "
            f"{share[r]:.1%} of their swaps, so that colder rungs may miss modes, and "
            "all values there may be wrong beyond their errors. Give more temperatures "
            "between these two as betas, or raise num_temperatures.",
            stacklevel=2,
        )
    return xr.Dataset(columns)


def _estimates(
    energies: Float[np.ndarray, "chains rungs draws"], betas: np.ndarray
) -> np.ndarray:
    """Return mean energies, heat capacities, and log Z less that at beta = 0."""
    steps = np.diff(betas)[..., None]
    low = steps * energies[:, :-1]
    high = steps * energies[:, 1:]
    log_z = np.zeros((*betas.shape, 1))
    for _ in range(_ITERATIONS):
        ratio = np.diff(log_z, axis=1)
        first = expit(-low - ratio).sum(-1, keepdims=True)
        second = expit(high + ratio).sum(-1, keepdims=True)
        log_z[:, 1:] += np.log(first / second).cumsum(1)
    return np.stack([energies.mean(-1), betas**2 * energies.var(-1), log_z[..., 0]])
