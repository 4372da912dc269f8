# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a long run leaves in its folder, and what tells it from another run."""

from collections.abc import Mapping
import functools
import os
from typing import Any

import numpy as np
from numpyro.infer.mcmc import MCMC, MCMCKernel

import jax
from jax import Array, core
import jax.numpy as jnp

from ebmpp.core import archive, checkpoints
from ebmpp.core.identity import function_identity
from ebmpp.core.names import leaves_by_name
from ebmpp.errors import CheckpointError
from ebmpp.graph import FactorGraph
from ebmpp.graph.saving import energies
from ebmpp.kernels.long_runs import drawn
from ebmpp.kernels.long_runs.chains import Chains, Plan
from ebmpp.kernels.long_runs.totals import Totals


class Record(checkpoints.Checkpoints):
    """The folder of one run: its checkpoints, and the files of its draws.

    A checkpoint is written after the draws before it, so a run that is killed in between writes some of them
    once more, the same ones.
    """

    caller = checkpoints.Caller(
        archive.Kind("ebmpp long run", 1, "LongRun"), "LongRun", "directory", "MCMC's num_samples"
    )

    def __init__(self, directory: str | os.PathLike[str], run: Mapping[str, Any], resume: bool) -> None:
        _refuse_foreign(directory)
        super().__init__(directory, run, resume)

    def save(self, step: int, num_draws: int, chains: Chains, totals: Totals) -> None:
        """Everything that a run needs to go on after ``step`` steps.

        :raises OSError: where the disk does not take it; checkpoints that were there are there still.
        """
        leaves = [as_numbers(leaf) for leaf in jax.tree.leaves((chains.state, chains.sums))]
        told = {
            "leaves": len(leaves),
            "batch": totals.length,
            "batches": totals.batches,
            "num_draws": num_draws,
        }
        self.write(step, told, [*leaves, *totals.arrays()])


def _refuse_foreign(directory: Any) -> None:
    """:raises CheckpointError: where files of draws are that nobody is known to have written."""
    try:
        names = os.listdir(directory)
    except (OSError, TypeError, ValueError):
        return  # what is wrong with it is told later
    ours = drawn.files(names)
    if ours and checkpoints.MARKER not in names:
        raise CheckpointError(
            f"{directory} holds {ours[0]!r} and no {checkpoints.MARKER}, so no run of ebmpp is known to have "
            "written it: give another directory"
        )


def restored(found: checkpoints.Checkpoint, chains: Chains, totals: Totals) -> Chains:
    """Chains as they were saved; ``totals`` are changed in place.

    :param chains: of the same run, at its beginning.
    :raises CheckpointError: for arrays of other shapes or dtypes, as of another version of a kernel.
    """
    count, like = found.told["leaves"], (chains.state, chains.sums)
    leaves, structure = jax.tree.flatten(like)
    kind = lambda a: (a.shape, a.dtype)
    fits = [kind(as_numbers(a)) == kind(b) for a, b in zip(leaves, found.arrays[:count], strict=False)]
    if count != len(leaves) or not all(fits):
        raise CheckpointError(
            "LongRun: the checkpoint's state has other shapes or dtypes than the kernel's: another version "
            "of the kernel wrote it, or jax had other floats; go on as the run began, or give another "
            "directory"
        )
    totals.load(found.told["batches"], found.arrays[count:])
    made = map(_as_leaf, found.arrays[:count], leaves)
    state, sums = jax.tree.unflatten(structure, made)
    return chains._replace(state=state, sums=sums)


def as_numbers(leaf: Any) -> np.ndarray:
    """A leaf of a state; keys as the words that they are."""
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _as_leaf(numbers: np.ndarray, like: Array) -> Array:
    made = jnp.asarray(numbers)
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(like)) if _is_key(like) else made


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


# -- what tells one run from another ---------------------------------------------------------------


def identity(mcmc: MCMC, plan: Plan, kernel: MCMCKernel, given: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values by name, the same in the next process.

    :param kernel: that of the plan, as ``init`` leaves it.
    :param given: by name, trees of what is given to the run: its key, arguments, initial values.
    """
    method = mcmc.chain_method
    return {
        "kernel": _short(_kernel(kernel)),
        "num_warmup": plan.num_warmup,
        "num_chains": plan.num_chains,
        "chain_method": method if isinstance(method, str) else function_identity(method),
        "thinning": plan.thinning,
        "postprocess_fn": None if plan.postprocess is None else function_identity(plan.postprocess),
        "fn": function_identity(plan.fn),
        "covariance": None if plan.covariance is None else function_identity(plan.covariance),
        "fold": None if plan.fold is None else function_identity(plan.fold),
        "fields": list(plan.fields),
        "keep": plan.keep if isinstance(plan.keep, bool) else list(plan.keep),
        **{name: _tree(value) for name, value in given.items()},
    }


def _tree(value: Any) -> Any:
    """A tree as its structure and a hash of its leaves."""
    leaves, structure = jax.tree.flatten(value)
    return (
        [str(structure), archive.hashed([_value(leaf, frozenset()) for leaf in leaves])] if leaves else None
    )


def _short(told: Any) -> Any:
    """The kernel's class, and a hash of the rest."""
    return [told[0], archive.hashed(told)]


def _kernel(kernel: MCMCKernel, above: frozenset[int] = frozenset()) -> list[Any]:
    """Its class, and what is kept of it where it is pickled; graphs by their energies, functions by theirs.

    What is none of what is known here counts by its class alone: a run that could go on is worse to refuse
    than one with another object of a user's own to let pass.
    """
    held = kernel.__reduce_ex__(4)  # a tuple: every kernel pickles
    return [type(kernel).__name__, *(_value(part, above | {id(kernel)}) for part in held[1:3])]


def _value(value: Any, above: frozenset[int]) -> Any:
    inner = functools.partial(_value, above=above | {id(value)})
    if id(value) in above:
        return "itself"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, core.Tracer):
        return "traced"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return archive.digest({"array": as_numbers(value)})
    if isinstance(value, MCMCKernel):
        return _kernel(value, above)
    if isinstance(value, FactorGraph):
        return [repr(value), energies(value)]
    if isinstance(value, Mapping):
        return ["mapping", *sorted([str(k), inner(v)] for k, v in value.items())]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(inner, value)]
    if callable(value) and not isinstance(value, type):
        return function_identity(value)
    leaves = jax.tree.leaves(value)
    known = [] if len(leaves) == 1 and leaves[0] is value else list(map(inner, leaves))
    return [type(value).__qualname__, *known]


def draws_of(chains: Chains, plan: Plan, num: int) -> drawn.Groups:
    """The first ``num`` draws that a call kept, ``(chains, draws, ...)`` each."""
    take = lambda a: np.asarray(a[:num]).swapaxes(0, 1) if plan.together else np.asarray(a[:, :num])
    names = {"posterior": "draw", "sample_stats": "field"}
    return {g: leaves_by_name(jax.tree.map(take, chains.kept[g]), names[g]) for g in chains.kept}
