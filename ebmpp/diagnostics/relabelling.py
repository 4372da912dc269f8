# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Label switching: one order of a mixture's components in all draws of a run."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from jax.typing import ArrayLike

from ebmpp.core import checks

_MOST_ROUNDS = 100


def relabel(
    samples: Mapping[str, ArrayLike],
    log_conditionals: Mapping[str, ArrayLike],
    sites: Sequence[str] | Mapping[str, int | Sequence[int]],
) -> dict[str, np.ndarray]:
    r"""Return samples in which each component of a mixture has one label.

    The posterior is the same for any order of the components, so chains order them
    differently and may exchange them. Here the components of each draw d are permuted
    until the units' probabilities p overlap most with their mean over all draws:

    .. math:: \max_\pi \sum_{i, k} q_{ik} \, p^{(d)}_{i, \pi(k)}, \qquad
        q_{ik} = \frac{1}{D} \sum_d p^{(d)}_{i, \pi_d(k)}

    The first mean is the draw whose probabilities are the most certain. Functions of
    the samples that do not depend on labels stay as they are.

    :param samples: by site, ``(draws, *shape)``, such as ``mcmc.get_samples()``.
    :param log_conditionals: by discrete site whose values are the components
        0, ..., K - 1, the log probabilities ``(draws, *shape, K)`` of these, such as
        ``jax.vmap(block.log_conditionals)(samples)`` of a block of
        :meth:`~ebmpp.GibbsBlock.from_model`.
    :param sites: names of the sites whose first axis is that of the components; or by
        name the axis, or axes, of the site's shape, such as
        ``{"means": 0, "rows": (0, 1)}`` with transition probabilities.
    :return: all samples as numpy arrays, the components of ``sites`` and the values of
        the discrete sites permuted.
    :raises ArgumentError: for a site that is not among the samples, an axis or
        probabilities of another length, and values that are no labels.

    **References**

    1. Stephens (2000), *Dealing with label switching in mixture models*.
    2. Papastamoulis, Iliopoulos (2010), *An artificial allocations based solution to
       the label switching problem in Bayesian analysis of mixtures of distributions*.

    **Example**

    >>> import numpy as np, ebmpp
    >>> z = np.array([[0, 1, 1], [1, 0, 0]])  # two draws of the labels of three points
    >>> log_conditionals = {"z": np.log(np.where(z[..., None] == np.arange(2), 0.9, 0.1))}
    >>> samples = {"means": np.array([[-2.0, 2.0], [2.1, -1.9]]), "z": z}
    >>> relabelled = ebmpp.diagnostics.relabel(samples, log_conditionals, ["means"])
    >>> relabelled["means"].tolist(), relabelled["z"].tolist()
    ([[-2.0, 2.0], [-1.9, 2.1]], [[0, 1, 1], [0, 1, 1]])
    """
    axes = dict(sites) if isinstance(sites, Mapping) else dict.fromkeys(sites, 0)
    if not log_conditionals:
        raise checks.error(
            "relabel: log_conditionals", "of one site or more", log_conditionals
        )
    checks.names("site of samples", [*axes, *log_conditionals], samples)
    result = {name: np.asarray(a) for name, a in samples.items()}
    permutations = _permutations(_probabilities(log_conditionals, result))
    for name, places in axes.items():
        for axis in np.atleast_1d(places):
            result[name] = _permuted(name, result[name], permutations, int(axis))
    labels = np.argsort(permutations, 1)
    for name in log_conditionals:
        z = result[name]
        new = np.take_along_axis(labels, z.reshape(len(z), -1).astype(int), 1)
        result[name] = new.reshape(z.shape).astype(z.dtype)
    return result


def _probabilities(
    log_conditionals: Mapping[str, ArrayLike], samples: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the probabilities of all units' components, ``(draws, units, K)``."""
    sizes = {np.shape(a)[-1] for a in log_conditionals.values()}
    size = min(sizes)
    parts = []
    if len(sizes) > 1:
        raise checks.error(
            "relabel: log_conditionals", f"of {size} components each", log_conditionals
        )
    for name, values in log_conditionals.items():
        z = samples[name]
        probs = np.exp(np.asarray(values))
        if probs.size != z.size * size:
            raise checks.error(
                f"relabel: log_conditionals[{name!r}]",
                f"one for each of {size} components of the {z.size} values of site {name!r}",
                values,
            )
        if not ((z >= 0) & (z < size)).all():
            raise checks.error(
                f"relabel: samples[{name!r}]", f"labels from 0 to {size - 1}", z
            )
        parts.append(probs.reshape(len(z), -1, size))
    return np.concatenate(parts, 1)


def _permutations(probs: np.ndarray) -> np.ndarray:
    """Return, by draw, the components in their new order, ``(draws, K)``."""
    mean = probs[(probs**2).sum((1, 2)).argmax()]
    permutations = np.zeros(0)
    for _ in range(_MOST_ROUNDS):
        overlaps = mean.T @ probs
        before = permutations
        permutations = np.stack(
            [linear_sum_assignment(o, maximize=True)[1] for o in overlaps]
        )
        if np.array_equal(before, permutations):
            break
        mean = np.take_along_axis(probs, permutations[:, None], 2).mean(0)
    return permutations


def _permuted(
    name: str, values: np.ndarray, permutations: np.ndarray, axis: int
) -> np.ndarray:
    """Return the samples of a site with the components on one of its axes permuted."""
    draws, size = permutations.shape
    places = range(1, values.ndim)
    is_axis = -len(places) <= axis < len(places) and values.shape[places[axis]] == size
    if not is_axis or len(values) != draws:
        raise checks.error(
            f"relabel: samples[{name!r}]",
            f"{draws} draws with {size} components on axis {axis}",
            values,
        )
    shape = [size if place == places[axis] else 1 for place in places]
    return np.take_along_axis(values, permutations.reshape(draws, *shape), places[axis])
