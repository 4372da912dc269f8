# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws and histories as ArviZ DataTrees, and a summary that owns up to frozen chains."""

from collections.abc import Mapping
import copy
import importlib
from types import SimpleNamespace
from typing import Any, cast
import warnings

import numpy as np
from numpyro.infer import MCMC, Gibbs
import pandas as pd
import xarray as xr

from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.diagnostics import long_draws
from ebmpp.diagnostics.meeting import meeting_data
from ebmpp.diagnostics.naming import (
    Coords,
    Dims,
    Kernel,
    attributes,
    coords_of,
    dims_of,
    row_dims,
    statistics,
)
from ebmpp.errors import ArgumentError
from ebmpp.kernels import LongDraws, MaximalCoupling, RowKernel
from ebmpp.ppl import CoupledComposite, Exchange, GibbsBlock
from ebmpp.traced import ModelBlock

_BY_SWEEP = ("distance", "energies")  # of coupled kernels: the group "meeting" has them
_NEEDS_MOVEMENT = ("ess", "mcse", "r_hat")


def to_datatree(result: Any, *, dims: Dims | None = None, coords: Coords | None = None) -> xr.DataTree:
    """An ArviZ DataTree of a sampling run, an unbiased estimate or a fit.

    A run gives the group ``posterior`` (dimensions ``chain``, ``draw``, then ``row`` where clamped values had
    leading axes, then ``<block>_dim_0``...), ``sample_stats`` where extra fields were collected, and, for
    coupled kernels, ``meeting``: ``meeting_time``, ``met`` and ``lag``, and over ``sweep`` the pairs'
    distances and energies (not those of composites). A run of ``numpyro.infer.Gibbs``, or of a block by
    itself that :meth:`~ebmpp.GibbsBlock.from_model` made, has what ``arviz_base.from_numpyro`` makes of it,
    plates and ``observed_data`` included. An estimate gives ``meeting`` without paths (a ``chain`` a pair), a
    fit the group ``history``. Save with ``tree.to_netcdf(path, engine="h5netcdf")``.

    A long run (:class:`ebmpp.kernels.LongRun`) gives ``moments``: what its :class:`~ebmpp.kernels.Moments`
    hold, over ``statistic``; and where it kept draws, ``posterior`` and ``sample_stats``, which stay in its
    files until they are looked at.

    Sample statistics have ArviZ's names: ``acceptance_rate`` (of ``acceptance``, a running mean, and of
    ``accept_prob``), ``n_steps``, ``step_size``, ``lp``; others keep their own, those of a block of Gibbs
    without ``block_states.0.``.

    ArviZ 1 takes the tree as it is. ArviZ 0.x, the last for Python 3.11, takes what :func:`to_arviz` makes.

    :param result: a :class:`numpyro.infer.MCMC` of an ebmpp kernel or of ``numpyro.infer.Gibbs``, after
        ``run``; what a long run returns; or a fit (an object with an xarray ``history``).
    :param dims: of a run, by block or site: names of its own axes, or of all after ``chain`` and ``draw``.
    :param coords: by dimension, the names along it, as many as it is long. Where units have names
        (``graph.labels``: nodes of a networkx graph) these are the default.
    :raises ArgumentError: for anything else, an MCMC that has not run, or dims and coords that do not fit.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli((2, 2)), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(ebmpp.BlockedGibbs(rbm), num_warmup=0, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> tree = ebmpp.to_datatree(mcmc, dims={"v": ["line", "column"]}, coords={"line": ["top", "bottom"]})
    >>> dict(tree.posterior.sizes)
    {'chain': 1, 'draw': 20, 'h_dim_0': 3, 'line': 2, 'column': 2}
    >>> tree.posterior["v"].sel(line="top").shape
    (1, 20, 2)
    """
    if isinstance(result, MCMC):
        with warnings.catch_warnings():
            # many short coupled chains are what a meeting time is estimated from, and no mistake
            warnings.filterwarnings("ignore", "Found chain dimension to be longer", UserWarning)
            return _from_mcmc(result, dict(dims or {}), dict(coords or {}))
    if isinstance(result, LongDraws):
        return long_draws.tree(result, dict(dims or {}), dict(coords or {}))
    if dims or coords:
        raise ArgumentError(f"dims and coords are of a run's draws, and {type(result).__name__} has none")
    if isinstance(result, UnbiasedEstimate):
        return xr.DataTree.from_dict({"/": xr.Dataset(attrs=attributes(None)), "meeting": _times(result)})
    if isinstance(getattr(result, "history", None), xr.Dataset):
        attrs = attributes(getattr(result, "graph", None))
        return xr.DataTree.from_dict({"/": xr.Dataset(attrs=attrs), "history": result.history})
    raise ArgumentError(
        f"to_datatree takes an MCMC of an ebmpp kernel, an estimate or a fit, not {type(result).__name__}"
    )


def to_arviz(result: Any, **options: Any) -> Any:
    """What the functions of the ArviZ at hand take: ``az.summary(to_arviz(mcmc))``, ``az.plot_trace(...)``.

    That is the DataTree of :func:`to_datatree` for ArviZ 1, and an ``InferenceData`` of it for ArviZ 0.x,
    whose functions fail on a DataTree. Groups without draws (``meeting``, ``history``) come along.

    :param result: a DataTree, or what :func:`to_datatree` takes.
    :param options: of :func:`to_datatree`.
    :raises ImportError: where ArviZ is not installed (``arviz_stats`` alone takes DataTrees).
    :raises ArgumentError: as :func:`to_datatree`.

    **Example**

    >>> import numpy as np, xarray as xr
    >>> from ebmpp.diagnostics import to_arviz
    >>> posterior = xr.Dataset({"x": (("chain", "draw"), np.eye(3))})
    >>> to_arviz(xr.DataTree.from_dict({"posterior": posterior})).posterior["x"].shape
    (3, 3)
    """
    tree = result if isinstance(result, xr.DataTree) else to_datatree(result, **options)
    arviz = importlib.import_module("arviz")
    return arviz.InferenceData.from_datatree(tree) if arviz.__version__.startswith("0.") else tree


def _from_mcmc(mcmc: MCMC, dims: dict[str, Any], coords: dict[str, Any]) -> xr.DataTree:
    kernel = mcmc.sampler
    if not isinstance(kernel, Kernel):
        raise ArgumentError(
            "to_datatree takes an MCMC of an ebmpp kernel or of numpyro.infer.Gibbs, not of "
            f"{type(kernel).__name__}; arviz_base.from_numpyro converts those of NumPyro"
        )
    if mcmc.last_state is None:
        raise ArgumentError("this MCMC has no draws yet; call mcmc.run(key, params) first")
    import arviz_base  # brings matplotlib with it where that is installed

    samples = _host(mcmc.get_samples(group_by_chain=True))
    graph = kernel.graph if isinstance(kernel, RowKernel | Exchange | GibbsBlock) else None
    theirs = _theirs(mcmc)
    attrs, named = attributes(graph, kernel), dims_of(kernel, samples, dims, theirs)
    coords = coords_of(kernel, samples, named, coords)
    groups = {"posterior": samples}
    extra = {b: v for b, v in _host(mcmc.get_extra_fields(group_by_chain=True)).items() if b != "z"}
    plain = {name: v for name, v in extra.items() if isinstance(v, np.ndarray) and name not in _BY_SWEEP}
    if plain:
        groups["sample_stats"] = statistics(plain)
    whole = dict.fromkeys(["/", *groups], attrs)
    tree = arviz_base.from_dict(groups, dims=named, coords=coords, attrs=whole)
    for name in (name for name in theirs.children if name not in groups):
        made = theirs[name].to_dataset()
        tree[name] = xr.DataTree(made.assign_coords({d: v for d, v in coords.items() if d in made.dims}))
    if isinstance(kernel, MaximalCoupling | CoupledComposite):
        tree["meeting"] = xr.DataTree(_meeting(mcmc, attrs))
    return tree


def _theirs(mcmc: MCMC) -> xr.DataTree:
    """What ArviZ makes of the run of a model, which knows of plates and of what was observed."""
    import arviz_base  # late, as above

    kernel = mcmc.sampler
    if isinstance(kernel, ModelBlock):  # has its model elsewhere: NumPyro asks blocks of Gibbs for none
        mcmc = copy.copy(mcmc)
        mcmc.sampler = SimpleNamespace(model=kernel.posterior.model)
    return arviz_base.from_numpyro(mcmc) if isinstance(kernel, Gibbs | ModelBlock) else xr.DataTree()


def _host(fields: Mapping[str, Any]) -> dict[str, Any]:
    is_array = lambda v: hasattr(v, "dtype") and not isinstance(v, Mapping)
    return {name: np.asarray(v) if is_array(v) else v for name, v in fields.items()}


# -- meetings --------------------------------------------------------------------------------------


def _meeting(mcmc: MCMC, attrs: Mapping[str, str]) -> xr.Dataset:
    state = mcmc.last_state
    made = xr.Dataset(attrs=dict(attrs))
    for name in ("meeting_time", "met"):
        value = np.asarray(getattr(state, name))
        value = value[None] if mcmc.num_chains == 1 else value
        made[name] = (["chain", *row_dims(value.ndim - 1)], value)
    made["lag"] = mcmc.sampler.lag
    if isinstance(mcmc.sampler, MaximalCoupling):
        made = made.assign(_by_sweep(mcmc))
    return made.assign_coords(chain=np.arange(made.sizes["chain"]))


def _by_sweep(mcmc: MCMC) -> dict[str, Any]:
    """What was seen of each pair along the way, against the sweeps that its leading chain had done."""
    fields = mcmc.get_extra_fields(group_by_chain=True)
    distance, energies = (np.asarray(fields[name]) for name in _BY_SWEEP)
    draws, last = distance.shape[1], int(np.max(mcmc.last_state.t))
    dims = ["chain", "sweep", *row_dims(distance.ndim - 2)]
    seen = {"distance": distance, "energy": energies[:, :, 0], "energy_following": energies[:, :, 1]}
    sweep = last - mcmc.thinning * np.arange(draws)[::-1]
    return {"sweep": sweep} | {name: (dims, v) for name, v in seen.items()}


def _times(estimate: UnbiasedEstimate) -> xr.Dataset:
    """Unmet pairs as right-censored: the time they were stopped at, and ``met`` False."""
    times, met, lag = meeting_data(estimate)
    columns = {"meeting_time": times, "met": met, "cost": estimate.cost}
    made = xr.Dataset({name: ("chain", v) for name, v in columns.items()}, attrs=attributes(None))
    return made.assign(lag=lag).assign_coords(chain=np.arange(len(met)))


def summary(tree: xr.DataTree | xr.Dataset, **kwargs) -> pd.DataFrame:
    """:func:`arviz_stats.summary`, honest about what never moved.

    A value that is the same in every draw of each chain has no effective sample size: its chains may
    be stuck, or the unit nearly certain, and the draws cannot tell which (estimators of the effective
    sample size answer with the number of draws, and R-hat with nan). Such rows get nan for the
    effective sample size, its Monte Carlo error and R-hat, and True in the column ``frozen``.

    :param tree: what :func:`to_datatree` returns, or any tree or dataset with ``chain`` and ``draw``.
    :param kwargs: passed on (``var_names``, ``group``, ``kind``, ``round_to``...), but for ``fmt``.
    :return: one row a scalar.
    :raises ArgumentError: for a ``fmt``.

    **References**

    1. Vehtari, Gelman, Simpson, Carpenter, Buerkner (2021), *Rank-normalization, folding, and
       localization: an improved R-hat for assessing convergence of MCMC*.

    **Example**

    >>> import arviz_base, numpy as np
    >>> x = np.stack([np.random.default_rng(0).normal(size=(2, 100)), np.ones((2, 100))], axis=-1)
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     summary(arviz_base.from_dict({"posterior": {"x": x}}))["frozen"].tolist()
    [False, True]
    """
    import arviz_base  # late, as above
    import arviz_stats

    if "fmt" in kwargs:
        raise ArgumentError("summary returns one row a scalar; use arviz_stats.summary for another fmt")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # the estimators divide by the variance within chains, which is zero where nothing moved
        warnings.simplefilter("ignore", RuntimeWarning)
        table = arviz_stats.summary(tree, **kwargs)
    chosen = {k: v for k, v in kwargs.items() if k in ("var_names", "filter_vars", "group", "sample_dims")}
    draws = cast(xr.Dataset, arviz_base.extract(tree, combined=False, keep_dataset=True, **chosen))
    if kwargs.get("coords") is not None:
        draws = draws.sel(kwargs["coords"])
    frozen = _frozen(draws).loc[table.index]
    affected = [c for c in table.columns if c.startswith(_NEEDS_MOVEMENT)]
    table[affected] = table[affected].astype(float)
    table.loc[frozen, affected] = np.nan
    table["frozen"] = frozen
    if frozen.any():
        named = ", ".join(map(str, table.index[frozen][:3])) + (", ..." if frozen.sum() > 3 else "")
        warnings.warn(
            f"{int(frozen.sum())} of {len(table)} values are constant in every chain ({named}): stuck "
            "chains or nearly certain units, so they have no effective sample size; run longer, or "
            "start the chains apart",
            stacklevel=2,
        )
    return table


def _frozen(draws: xr.Dataset) -> pd.Series:
    """Whether each scalar keeps one value throughout each chain, labelled as ArviZ labels them."""
    from arviz_base import dataset_to_dataframe

    moved = (draws.max("draw") > draws.min("draw")).any([d for d in ("chain",) if d in draws.dims])
    flags = dataset_to_dataframe(moved.expand_dims(summary=["moved"]), sample_dims=["summary"])
    return ~flags.T["moved"].astype(bool)
