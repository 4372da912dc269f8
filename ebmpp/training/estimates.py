# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Result of :func:`ebmpp.estimate`."""

import dataclasses

from jaxtyping import Float
import numpy as np

import jax

from ebmpp.core import Params
from ebmpp.core.display import Card, Grid, Shown

_QUANTILE = 1.959964  # of the normal distribution, at 0.975
_HEAD = "", "estimate", "std error", "MC error", "2.5%", "97.5%"


@dataclasses.dataclass(frozen=True, repr=False)
class Estimates(Shown):
    """Maximum-likelihood estimates; see :func:`ebmpp.estimate`. They print as a table.

    :param params: the estimates, an argument of every other function.
    :param standard_error: a tree like ``params``: standard deviations over data sets,
        from the inverse of the observed information; inf for params on the boundary or
        undetermined, and nan where pairs did not meet. A huge one marks a param that the
        data hardly determine.
        Categories and the like, of which different params are the same model, have the
        errors of the params of smallest norm, each in units of 1 / standard deviation
        of its score.
    :param monte_carlo_error: a tree like ``params``: standard deviations over keys; 0
        where all states were summed.
    :param verdict: "converged", "undetermined", "boundary" or "degenerate".
    :param covariance: of the estimates, in the order of ``names``.
    """

    params: Params
    standard_error: Params
    monte_carlo_error: Params
    verdict: str
    covariance: Float[np.ndarray, "params params"]

    @property
    def names(self) -> list[str]:
        """Names of the params, such as ``"v:h[0,1]"``."""
        names = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            for index in np.ndindex(np.shape(leaf)):
                places = ",".join(map(str, index))
                names.append(f"{name}[{places}]" if index else name)
        return names

    @property
    def message(self) -> str:
        """The verdict and its reason."""
        infinite = np.isinf(self.covariance.diagonal())
        names = ", ".join(name for name, is_on in zip(self.names, infinite) if is_on)
        reasons = {
            "undetermined": f": the information about {names} does not differ clearly from 0. "
            "Pass more rows, a prior, more num_pairs, or a model with fewer units",
            "boundary": f": no finite maximum in {names}",
            "degenerate": ": two phases, none of which is like the data",
        }
        return self.verdict + reasons.get(self.verdict, "")

    def __repr__(self) -> str:
        return str(self)

    def _card(self) -> Card:
        trees = self.params, self.standard_error, self.monte_carlo_error
        value, error, noise = (
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
            for tree in trees
        )
        reach = _QUANTILE * error
        columns = value, error, noise, value - reach, value + reach
        rows = zip(self.names, *(column.tolist() for column in columns))
        return Card(f"Estimates, {self.message}", [Grid(_HEAD, [*rows])])
