# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Indirect sampling likelihood: held-out rows under a kernel density of samples."""

from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any

from jaxtyping import Bool, Float, Integer, Shaped
import numpy as np

from ebmpp.core import checks
from ebmpp.core.statistics import standard_error
from ebmpp.errors import ArgumentError
from ebmpp.evaluate.rows import as_rows, square_distances

#: Kernels, and what they are for.
KERNELS = ("bernoulli", "gaussian")

_GRID = {"bernoulli": 1 - np.geomspace(0.4, 0.005, 25), "gaussian": np.geomspace(0.02, 2.0, 31)}


@dataclasses.dataclass(frozen=True)
class SampleLikelihood:
    """What samples tell of held-out rows; see :func:`indirect_likelihood`."""

    num_samples: Integer[np.ndarray, "counts"]
    """How many samples each value is of, ``(counts,)``."""
    value: Float[np.ndarray, "counts"]
    """Mean log-density of the held-out rows, ``(counts,)``."""
    standard_error: Float[np.ndarray, "counts"]
    """Of that mean over rows, the samples being what they are: **not** over runs of the sampler."""
    bandwidth: Float[np.ndarray, "counts"]
    """The one that was best on the validation rows, ``(counts,)``: beta, or the standard deviation."""
    at_edge: Bool[np.ndarray, "counts"]
    """Whether that is the first or the last that was tried, so that a wider range may do better."""
    log_density: Float[np.ndarray, "counts rows"] = dataclasses.field(repr=False)
    """Row by row, ``(counts, rows)``: for paired comparisons of samplers."""
    kernel: str = "bernoulli"

    def __repr__(self) -> str:
        last = f"{self.value[-1]:.6g} +- {self.standard_error[-1]:.2g}"
        return f"SampleLikelihood({last} from {self.num_samples[-1]} samples, {self.kernel} kernel)"


def indirect_likelihood(
    samples: Any,
    held_out: Any,
    *,
    validation: Any = None,
    num_samples: Sequence[int] | None = None,
    kernel: str | None = None,
    bandwidth: float | Sequence[float] | None = None,
    chunk: int = 256,
) -> SampleLikelihood:
    """Mean log-density of held-out rows under a mixture of kernels at the samples, one a sample.

    With kernel "bernoulli" a unit equals that of the sample with probability beta,
    ``p(x) = 1/N sum_s prod_i beta^[x_i = s_i] (1 - beta)^[x_i != s_i]``; with "gaussian" it is normal about
    it. The bandwidth is chosen on validation rows for each number of samples. A curve that rises soon is of
    a sampler that mixes; where it ends tells of the model, and of the kernel.

    It is a proxy, and no likelihood of the model: it depends on the kernel, is far below log p(x) in many
    dimensions, and is highest for samples that copy the data. Compare samplers of one model on the same
    rows, and put the training rows themselves in for the samples once, to see what good samples can reach.
    Its standard error is over held-out rows alone; run the sampler more than once for the rest.

    :param samples: shape ``(samples, *shape)``, in the order of the chain.
    :param held_out: shape ``(rows, *shape)``, not used for training.
    :param validation: rows that are neither; needed unless ``bandwidth`` is one number.
    :param num_samples: increasing numbers of samples to stop at; all by default.
    :param kernel: "bernoulli" for two values, 0 and 1 or -1 and 1, "gaussian" for others; by default what
        the values are.
    :param bandwidth: beta in (1/2, 1), or a standard deviation: one, or those that are tried.
    :param chunk: rows whose distances from all samples are in memory together.
    :raises ArgumentError: for arrays, numbers or a kernel that do not fit.

    **References**

    1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from an RBM-derived
       process*, section 5.
    2. Desjardins et al. (2010), *Parallel tempering for training of restricted Boltzmann machines*.
    3. Theis, van den Oord, Bethge (2016), *A note on the evaluation of generative models*, on its limits.

    **Example**

    >>> import numpy as np
    >>> coins = np.random.default_rng(0).integers(0, 2, (4000, 9))  # the best possible is -9 log 2 = -6.24
    >>> indirect_likelihood(coins[:3000], coins[3000:3500], validation=coins[3500:])
    SampleLikelihood(-6.252 +- 0.0057 from 3000 samples, bernoulli kernel)
    """
    given = {"samples": samples, "held_out": held_out}
    x, rows, *others = as_rows(**given, **({} if validation is None else {"validation": validation}))
    kernel = _kernel(kernel, x, rows)
    tried = (
        _GRID[kernel] if bandwidth is None else checks.numbers("indirect_likelihood: bandwidth", bandwidth)
    )
    tried = np.atleast_1d(np.asarray(tried, float))
    _check_bandwidth(kernel, tried)
    if not others and len(tried) > 1:
        raise ArgumentError(
            "indirect_likelihood chooses the bandwidth on rows of its own: give validation=rows, or one "
            "bandwidth"
        )
    counts = _counts(num_samples, len(x))
    if kernel == "bernoulli":  # values 0 and 1: then a squared distance counts the units that differ
        x, rows, *others = (a > 0 for a in (x, rows, *others))
    sharp, constant = _sharpness(kernel, tried, x.shape[1])
    best = np.zeros(len(counts), int)
    if len(tried) > 1:
        best = (_log_sums(x, others[0], sharp, counts, chunk).mean(-1) + constant).argmax(-1)
    each = _log_sums(x, rows, sharp[np.unique(best)], counts, chunk)
    place = np.searchsorted(np.unique(best), best)
    each = each[np.arange(len(counts)), place] + constant[best][:, None]
    edge = (len(tried) > 1) & ((best == 0) | (best == len(tried) - 1))
    return SampleLikelihood(counts, each.mean(-1), standard_error(each), tried[best], edge, each, kernel)


def _kernel(kernel: str | None, x: np.ndarray, rows: np.ndarray) -> str:
    within = lambda low: all(((a == low) | (a == 1)).all() for a in (x, rows))
    two = within(0) or within(-1)
    kernel = kernel or ("bernoulli" if two else "gaussian")
    checks.choice("indirect_likelihood: kernel", kernel, KERNELS)
    if kernel == "bernoulli" and not two:
        raise ArgumentError(
            "the bernoulli kernel takes samples and rows of the same two values, 0 and 1 or -1 and 1; for "
            'others there is kernel="gaussian"'
        )
    return kernel


def _check_bandwidth(kernel: str, tried: np.ndarray) -> None:
    fits = (tried > 0.5) & (tried < 1) if kernel == "bernoulli" else (tried > 0) & np.isfinite(tried)
    if not tried.size or not fits.all():
        wanted = "beta in (1/2, 1)" if kernel == "bernoulli" else "a positive standard deviation"
        raise ArgumentError(f"bandwidth of the {kernel} kernel is {wanted}; got {tried.tolist()}")


def _counts(given: Sequence[int] | None, size: int) -> np.ndarray:
    counts = np.asarray([size] if given is None else given)
    sound = counts.ndim == 1 and counts.size and counts.dtype.kind in "iu"
    if not sound or counts[0] < 1 or (np.diff(counts) < 1).any() or counts[-1] > size:
        raise ArgumentError(
            f"num_samples are increasing ints from 1 to {size}, the samples given; not {given!r}"
        )
    return counts


def _sharpness(kernel: str, bandwidth: np.ndarray, units: int) -> tuple[np.ndarray, np.ndarray]:
    """a and c of the log kernel, c - a times the squared distance."""
    if kernel == "bernoulli":
        return np.log(bandwidth / (1 - bandwidth)), units * np.log(bandwidth)
    return 0.5 / bandwidth**2, -units * (np.log(bandwidth) + 0.5 * math.log(2 * math.pi))


def _log_sums(
    x: Shaped[np.ndarray, "samples units"],
    rows: Shaped[np.ndarray, "rows units"],
    sharp: Float[np.ndarray, "sharpness"],
    counts: Integer[np.ndarray, "counts"],
    chunk: int,
) -> Float[np.ndarray, "counts sharpness rows"]:
    """log of the mean over the first samples of exp(-a d^2)."""
    made = []
    for square in square_distances(rows, x, chunk):
        between = (square[:, begin:end] for begin, end in itertools.pairwise([0, *counts]))
        each = [[_log_sum(part, float(a)) for a in sharp] for part in between]
        made.append(np.logaddexp.accumulate(each, axis=0))
    return np.concatenate(made, axis=-1) - np.log(counts)[:, None, None]


def _log_sum(square: Float[np.ndarray, "rows samples"], a: float) -> Float[np.ndarray, "rows"]:
    """log sum exp(-a d^2) of each row, from its nearest: in float32 the exponentials are what takes time."""
    nearest = square.min(1, keepdims=True)
    return np.log(np.exp(-a * (square - nearest)).sum(1, dtype=float)) - a * nearest[:, 0].astype(float)
