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

from ebmpp.contrib.sample_quality.rows import as_rows, square_distances
from ebmpp.core import checks
from ebmpp.core.statistics import standard_error
from ebmpp.errors import ArgumentError

#: Default candidates for the bandwidth of each kernel.
_BANDWIDTHS = {
    "bernoulli": 1 - np.geomspace(0.4, 0.005, 25),
    "gaussian": np.geomspace(0.02, 2.0, 31),
}


@dataclasses.dataclass(frozen=True)
class SampleLikelihood:
    """Mean log-density of held-out rows by number of samples; see :func:`indirect_likelihood`."""

    num_samples: Integer[np.ndarray, "counts"]
    """Numbers of samples, ``(counts,)``."""
    value: Float[np.ndarray, "counts"]
    """Mean log-density of the held-out rows, ``(counts,)``."""
    standard_error: Float[np.ndarray, "counts"]
    """Standard error of that mean over rows for fixed samples, **not** over runs of the sampler."""
    bandwidth: Float[np.ndarray, "counts"]
    """Best bandwidth on the validation rows, ``(counts,)``: beta, or standard deviation."""
    at_edge: Bool[np.ndarray, "counts"]
    """True where it is the first or last candidate, so that a wider range may do better."""
    log_density: Float[np.ndarray, "counts rows"] = dataclasses.field(repr=False)
    """Log-density of each row, ``(counts, rows)``, for paired comparisons of samplers."""
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
    r"""Return the mean log-density of held-out rows under kernels at the samples.

    With the kernel "bernoulli" each unit equals the sample's with probability beta,

    .. math:: p(x) = \frac{1}{N} \sum_s \prod_i \beta^{[x_i = s_i]} (1 - \beta)^{[x_i \ne s_i]},

    and with "gaussian" it is normal around the sample's. The bandwidth is chosen on
    validation rows for each number of samples. A curve that rises early belongs to a
    sampler that mixes; its end depends on the model and on the kernel.

    This is a proxy and not the model's likelihood: it depends on the kernel, is far
    below log p(x) in high dimensions, and is highest for samples that copy the data.
    Compare samplers of one model on the same rows, and pass the training rows as
    samples once to see what good samples can reach.

    :param samples: shape ``(samples, *shape)``, in the order of the chain.
    :param held_out: shape ``(rows, *shape)``, not used for training.
    :param validation: further rows, needed unless ``bandwidth`` is one number.
    :param num_samples: increasing numbers of samples to evaluate at; all samples by
        default.
    :param kernel: "bernoulli" for two values, 0 and 1 or -1 and 1; "gaussian" for other
        values. By default the values decide.
    :param bandwidth: beta in (1/2, 1) or a standard deviation, one value or several
        candidates.
    :param chunk: number of rows whose distances from all samples are in memory at a
        time.
    :raises ArgumentError: arrays, numbers or a kernel that do not fit.

    **References**

    1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from
       an RBM-derived process*, section 5.
    2. Desjardins et al. (2010), *Parallel tempering for training of restricted
       Boltzmann machines*.
    3. Theis, van den Oord, Bethge (2016), *A note on the evaluation of generative
       models*, on its limits.

    **Example**

    >>> import numpy as np
    >>> # the best possible is -9 log 2 = -6.24
    >>> coins = np.random.default_rng(0).integers(0, 2, (4000, 9))
    >>> indirect_likelihood(coins[:3000], coins[3000:3500], validation=coins[3500:])
    SampleLikelihood(-6.252 +- 0.0057 from 3000 samples, bernoulli kernel)
    """
    arrays = {"samples": samples, "held_out": held_out}
    x, rows, *others = as_rows(
        **arrays, **({} if validation is None else {"validation": validation})
    )
    kernel = _kernel(kernel, x, rows)
    candidates = _candidates(kernel, bandwidth)
    if not others and len(candidates) > 1:
        raise ArgumentError(
            "indirect_likelihood needs validation rows to choose the bandwidth. Give "
            "validation=rows, or one bandwidth"
        )
    counts = _counts(num_samples, len(x))
    # as values 0 and 1, where a squared distance counts the units that differ
    if kernel == "bernoulli":
        x, rows, *others = (a > 0 for a in (x, rows, *others))
    sharpness, constant = _log_kernel(kernel, candidates, x.shape[1])
    best = np.zeros(len(counts), int)
    if len(candidates) > 1:
        best = (
            _log_means(x, others[0], sharpness, counts, chunk).mean(-1) + constant
        ).argmax(-1)
    log_density = _log_means(x, rows, sharpness[np.unique(best)], counts, chunk)
    index = np.searchsorted(np.unique(best), best)
    log_density = log_density[np.arange(len(counts)), index] + constant[best][:, None]
    edge = (len(candidates) > 1) & ((best == 0) | (best == len(candidates) - 1))
    value = log_density.mean(-1)
    error = standard_error(log_density)
    return SampleLikelihood(
        counts, value, error, candidates[best], edge, log_density, kernel
    )


def _kernel(kernel: str | None, x: np.ndarray, rows: np.ndarray) -> str:
    def within(low):
        return all(((a == low) | (a == 1)).all() for a in (x, rows))

    is_binary = within(0) or within(-1)
    kernel = kernel or ("bernoulli" if is_binary else "gaussian")
    checks.choice("indirect_likelihood: kernel", kernel, _BANDWIDTHS)
    if kernel == "bernoulli" and not is_binary:
        raise ArgumentError(
            "samples and held_out must have the values 0 and 1, or -1 and 1, for the "
            "bernoulli kernel. Use "
            'kernel="gaussian" for other values'
        )
    return kernel


def _candidates(kernel: str, bandwidth: Any) -> Float[np.ndarray, "candidates"]:
    if bandwidth is None:
        return _BANDWIDTHS[kernel]
    values = np.atleast_1d(
        np.asarray(checks.numbers("indirect_likelihood: bandwidth", bandwidth), float)
    )
    low, high = (0.5, 1) if kernel == "bernoulli" else (0, math.inf)
    if not values.size or not ((values > low) & (values < high)).all():
        raise ArgumentError(
            f"bandwidth of the {kernel} kernel must be in ({low}, {high}), got {values.tolist()}"
        )
    return values


def _counts(num_samples: Sequence[int] | None, size: int) -> np.ndarray:
    counts = np.asarray([size] if num_samples is None else num_samples)
    is_valid = counts.ndim == 1 and counts.size and counts.dtype.kind in "iu"
    if (
        not is_valid
        or counts[0] < 1
        or (np.diff(counts) < 1).any()
        or counts[-1] > size
    ):
        raise ArgumentError(
            f"num_samples must be increasing ints from 1 to {size}, got {num_samples!r}"
        )
    return counts


def _log_kernel(
    kernel: str, bandwidth: np.ndarray, units: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a and c of the log kernel ``c - a d^2``."""
    if kernel == "bernoulli":
        return np.log(bandwidth / (1 - bandwidth)), units * np.log(bandwidth)
    return 0.5 / bandwidth**2, -units * (
        np.log(bandwidth) + 0.5 * math.log(2 * math.pi)
    )


def _log_means(
    x: Shaped[np.ndarray, "samples units"],
    rows: Shaped[np.ndarray, "rows units"],
    sharpness: Float[np.ndarray, "sharpness"],
    counts: Integer[np.ndarray, "counts"],
    chunk: int,
) -> Float[np.ndarray, "counts sharpness rows"]:
    """Return the log of the mean of exp(-a d^2) over the first samples."""
    chunks = []
    for square in square_distances(rows, x, chunk):
        parts = (
            square[:, begin:end] for begin, end in itertools.pairwise([0, *counts])
        )
        sums = [[_log_sum(part, float(a)) for a in sharpness] for part in parts]
        chunks.append(np.logaddexp.accumulate(sums, axis=0))
    return np.concatenate(chunks, axis=-1) - np.log(counts)[:, None, None]


def _log_sum(
    square: Float[np.ndarray, "rows samples"], a: float
) -> Float[np.ndarray, "rows"]:
    """Return log sum exp(-a d^2) of each row, with exponentials in float32 for speed."""
    nearest = square.min(1, keepdims=True)
    return np.log(np.exp(-a * (square - nearest)).sum(1, dtype=float)) - a * nearest[
        :, 0
    ].astype(float)
