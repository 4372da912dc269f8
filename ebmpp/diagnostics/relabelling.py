# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Label switching: one order of a mixture's components in all draws of a run."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from jax.typing import ArrayLike

from ebmpp.core import checks

_MOST_ROUNDS = 100
_TOLERANCE = 0.02  # of sums of probabilities, which may have 16 bits


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
    :raises ArgumentError: for a site that is not among the samples or holds labels, an
        axis named twice, an axis or probabilities of another length, probabilities that
        are not finite, and values that are no labels.

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
    by_site = "a dict of arrays by site"
    checks.instance("relabel: samples", samples, Mapping, by_site)
    checks.instance("relabel: log_conditionals", log_conditionals, Mapping, by_site)
    checks.instance("relabel: sites", sites, Iterable, "names, or a dict of axes")
    axes = dict(sites) if isinstance(sites, Mapping) else dict.fromkeys(sites, 0)
    # a site of labels has no axis of components
    checks.names("site of samples", [*axes, *log_conditionals], samples)
    result = {name: np.asarray(a) for name, a in samples.items()}
    permutations = _permutations(_probabilities(log_conditionals, result))
    for name, axis_numbers in axes.items():
        result[name] = _permuted(name, result[name], permutations, axis_numbers)
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
    parts = []
    for name, values in log_conditionals.items():
        argument = f"relabel: log_conditionals[{name!r}]"
        probs = np.exp(np.asarray(checks.numbers(argument, values)))
        z = np.atleast_1d(samples[name])
        size = probs.shape[-1] if probs.ndim else 0
        are_labels = np.isin(z, range(size)).all() and probs.size == z.size * size
        if not are_labels or not np.allclose(probs.sum(-1), 1, atol=_TOLERANCE):
            expected = (
                "log probabilities of the labels 0, ..., K - 1 for each of the "
                f"{z.size} labels of site {name!r}"
            )
            raise checks.error(argument, expected, values)
        parts.append(probs.reshape(len(z), -1, size))
    shapes = {part.shape[::2] for part in parts}
    if len(shapes) != 1 or 0 in parts[0].shape:
        expected = "arrays of equally many draws and labels, one or more"
        raise checks.error("relabel: log_conditionals", expected, log_conditionals)
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
    name: str,
    values: np.ndarray,
    permutations: np.ndarray,
    axis_numbers: int | Sequence[int],
) -> np.ndarray:
    """Return the samples of a site with the components on some of its axes permuted."""
    draws, size = permutations.shape
    shape = values.shape[1:]
    places = np.arange(len(shape))
    axes = np.ravel(axis_numbers)
    is_axis = np.isin(axes, [*places, *~places]) & (axes.dtype.kind in "iu")
    numbers = {axis % len(shape) for axis in axes.tolist() if is_axis.all()}
    is_used = {shape[axis] for axis in numbers} == {size} and len(values) == draws
    if not is_used or len(numbers) < len(axes):
        raise checks.error(
            f"relabel: sites[{name!r}]",
            f"different axes of {size} components in the shape {shape} of {draws} draws",
            axis_numbers,
        )
    for axis in numbers:
        order = permutations.reshape(draws, *np.where(places == axis, size, 1))
        values = np.take_along_axis(values, order, 1 + axis)
    return values
