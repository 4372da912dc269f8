# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""ArviZ DataTrees of draws and histories, and a summary that marks frozen chains."""

from collections.abc import Callable, Hashable, Mapping, Sequence
import contextlib
import dataclasses
from functools import partial
import importlib
import math
from typing import Any, cast
import warnings

import numpy as np
from numpyro.infer import MCMC, Gibbs, log_likelihood
from numpyro.infer.gibbs import prototype_trace
import pandas as pd
import xarray as xr

import jax

from ebmpp.core import VERSION, checks, select
from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.diagnostics.meeting import meeting_data
from ebmpp.diagnostics.stillness import FEWEST, Stillness, stillness, warn_still
from ebmpp.errors import IntractableError
from ebmpp.kernels import (
    BlockedGibbs,
    LongDraws,
    MaximalCoupling,
    Moments,
    RowKernel,
)
from ebmpp.kernels.base import warn_acceptance
from ebmpp.kernels.streaming import leaves_by_name, variable_name, variable_names
from ebmpp.ppl import CoupledComposite, ModelBlock
from ebmpp.ppl.gibbs_block import GraphBlock
from ebmpp.traced.block import SiteKernel

# fields that other groups show
_NOT_STATISTICS = ("z", "distance")
_NEEDS_MOVEMENT = ("ess", "mcse", "r_hat")
# options of ArviZ's summary that select values
_SELECTIONS = "var_names filter_vars group sample_dims".split()
_MOST_DRAWS = 64  # whose likelihoods are computed in parallel
_MOST_LIKELIHOODS = 2**28  # of draws and observed values, 1 GB
#: The statistics of a value of a long run; ``chain_means`` has one axis more.
_STATISTICS = [f.name for f in dataclasses.fields(Moments) if f.name != "chain_means"]

_SAMPLE_DIMS = ("chain", "draw")
#: ArviZ's names of the kernels' fields.
_ARVIZ_NAMES = {
    "acceptance": "acceptance_rate",
    "accept_prob": "acceptance_rate",
    "num_steps": "n_steps",
    "log_density": "lp",
}

Dims = Mapping[str, Sequence[str]]
Coords = Mapping[str, Sequence[Any]]
#: Values of one field of a kernel's state.
FieldValues = np.ndarray | xr.DataArray
#: Names of a value's dimensions after chain and draw.
DimNames = dict[str, list[str]]
#: Sites of a model by name, from NumPyro.
Trace = Mapping[str, dict[str, Any]]
Samples = Mapping[str, np.ndarray]
Kernel = RowKernel | CoupledComposite | SiteKernel | Gibbs


def to_datatree(
    result: object, *, dims: Dims | None = None, coords: Coords | None = None
) -> xr.DataTree:
    """Return an ArviZ DataTree of a sampling run, an unbiased estimate or a fit.

    A run has the group ``posterior`` with dimensions ``chain``, ``draw``, ``row`` (if
    clamped values have leading axes), then ``<block>_dim_0`` and so on;
    ``sample_stats`` if extra fields were collected; and for coupled kernels ``meeting``
    with ``meeting_time``, ``met`` and ``lag``, and over ``sweep`` the pairs' distances
    (except for composites). A run of ``numpyro.infer.Gibbs``, or of a
    block from :meth:`~ebmpp.GibbsBlock.from_model` alone, has the names of plates and
    the groups ``observed_data`` and ``log_likelihood``, the latter for up to 2**28
    values, and with the first block's discrete sites summed out
    (:meth:`~ebmpp.ppl.ModelBlock.pointwise`) where these form a forest, as ``loo`` of
    ArviZ needs it. An estimate has the
    group ``meeting`` without paths (one ``chain`` per pair), a fit the group
    ``history``. A long run (:class:`ebmpp.kernels.LongRun`) has ``moments`` over
    ``statistic``, and, if draws were kept, ``posterior`` and ``sample_stats``, which
    are read from their file on demand.

    A variable has its site's name, with dots for slashes: ``left.z`` for ``left/z``. One
    that a dimension has, such as ``chain``, ends with an underscore.

    Sample statistics have ArviZ's names: ``acceptance_rate`` (of ``accept_prob``, or of
    the running mean ``acceptance``), ``n_steps``, ``step_size``, ``lp``. Others keep
    their names, without the prefix ``block_states.0.`` of blocks of Gibbs. A warning
    names the free blocks (or sites) of an MCMC whose chains stand still as wholes, see
    :func:`~ebmpp.diagnostics.summary`. Another counts the chains of
    :class:`~ebmpp.BlockedGibbs` that accept less than 5 % of their proposals since the
    start, from 100 sweeps on.

    Save the tree with ``tree.to_netcdf(path, engine="h5netcdf")``. ArviZ 1 accepts it;
    for ArviZ 0.x, the last on Python 3.11, convert it with :func:`to_arviz`.

    :param result: an :class:`numpyro.infer.MCMC` of an ebmpp kernel or of
        ``numpyro.infer.Gibbs``, after ``run``; the result of a long run; an estimate;
        or a fit (any object with an xarray ``history``).
    :param dims: for a run, by block or site, names of its own axes or of all axes after
        ``chain`` and ``draw``.
    :param coords: names along dimensions. By default the names of units, if there are
        any (in ``graph.labels``, the nodes of a networkx graph).
    :raises ArgumentError: another type, an MCMC that has not run, or dims and coords
        that do not fit.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli((2, 2)), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(ebmpp.BlockedGibbs(rbm), num_warmup=0, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> dims, coords = {"v": ["line", "column"]}, {"line": ["top", "bottom"]}
    >>> tree = ebmpp.to_datatree(mcmc, dims=dims, coords=coords)
    >>> dict(tree.posterior.sizes)
    {'chain': 1, 'draw': 20, 'h_dim_0': 3, 'line': 2, 'column': 2}
    >>> tree.posterior["v"].sel(line="top").shape
    (1, 20, 2)
    """
    if isinstance(result, MCMC):
        with warnings.catch_warnings():
            # many short coupled chains are intended: meeting times are estimated from
            # them
            warnings.filterwarnings(
                "ignore", "Found chain dimension to be longer", UserWarning
            )
            return _from_mcmc(result, dims or {}, coords or {})
    if isinstance(result, LongDraws):
        return _from_long_run(result, dims or {}, coords or {})
    groups = {}
    if isinstance(result, UnbiasedEstimate):
        times, met, lag = meeting_data(result)
        values = {
            "lag": lag,
            "overlap": result.overlap,
            "meeting_time": ("chain", times),
            "met": ("chain", met),
            "cost": ("chain", result.cost),
        }
        chains = {"chain": np.arange(len(met))}
        groups["meeting"] = xr.Dataset(values, chains, _attributes(None))
    elif isinstance(history := getattr(result, "history", None), xr.Dataset):
        groups["history"] = history
    if not groups or dims or coords:
        raise checks.error(
            "result",
            "an MCMC of an ebmpp kernel or, without dims and coords, an estimate or a fit",
            type(result),
        )
    root = xr.Dataset(attrs=_attributes(result))
    return xr.DataTree.from_dict({"/": root, **groups})


def to_arviz(result: object, **options: Any) -> Any:
    """Return the type that the installed ArviZ expects, for ``az.summary`` and plots.

    This is the DataTree of :func:`to_datatree` for ArviZ 1, and an ``InferenceData`` of
    it for ArviZ 0.x, whose functions fail on a DataTree. Groups without draws
    (``meeting``, ``history``) are included.

    :param result: a DataTree, or an argument of :func:`to_datatree`, which takes the
        ``options``.
    :raises ImportError: if ArviZ is not installed (``arviz_stats`` alone accepts
        DataTrees).
    :raises ArgumentError: as :func:`to_datatree`.

    **Example**

    >>> import numpy as np, xarray as xr
    >>> posterior = xr.Dataset({"x": (("chain", "draw"), np.eye(3))})
    >>> to_arviz(xr.DataTree.from_dict({"posterior": posterior})).posterior["x"].shape
    (3, 3)
    """
    tree = result if isinstance(result, xr.DataTree) else to_datatree(result, **options)
    arviz = importlib.import_module("arviz")
    if arviz.__version__.startswith("0."):
        return arviz.InferenceData.from_datatree(tree)
    return tree


def _from_mcmc(mcmc: MCMC, dims: Dims, coords: Coords) -> xr.DataTree:
    kernel = mcmc.sampler
    if not isinstance(kernel, Kernel) or mcmc.last_state is None:
        raise checks.error(
            "result, an MCMC,",
            "of an ebmpp kernel or of numpyro.infer.Gibbs, after mcmc.run(key, params)",
            type(kernel),
            hint="For others use arviz_base.",
        )
    import arviz_base  # imports matplotlib, if installed

    samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
    model_groups, plates = _model_groups(mcmc, samples)
    attrs = _attributes(kernel)
    names = _dims_of(kernel, samples, dims, plates)
    coords = _coords_of(kernel, samples, names, coords)
    extra = mcmc.get_extra_fields(group_by_chain=True)
    fields = {
        name: np.asarray(v)
        for name, v in extra.items()
        if name not in _NOT_STATISTICS and hasattr(v, "dtype")
    }
    variables = variable_names(samples)
    posterior = {variables[name]: x for name, x in samples.items()}
    groups: dict[str, Any] = {"posterior": posterior}
    if fields:
        groups["sample_stats"] = sample_statistics(fields)
    groups |= model_groups
    names = plates | {variables[name]: v for name, v in names.items()}
    tree = arviz_base.from_dict(
        groups, dims=names, coords=coords, attrs=dict.fromkeys(["/", *groups], attrs)
    )
    if isinstance(kernel, MaximalCoupling | CoupledComposite):
        tree["meeting"] = xr.DataTree(_run_meetings(mcmc, attrs))
    warn_still(_still_blocks(mcmc, samples), "free blocks", stacklevel=3)
    if isinstance(kernel, BlockedGibbs):
        warn_acceptance("to_datatree", cast(Any, mcmc.last_state), stacklevel=3)
    return tree


def _still_blocks(mcmc: MCMC, samples: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the kind of stillness of each free block; chains that moved and agree are sound."""
    state: Any = mcmc.last_state
    free = getattr(state, mcmc.sampler.sample_field)
    still = getattr(state, "still", {})
    kinds = {}
    for name, x in samples.items():
        if name not in free or x.shape[1] < FEWEST:
            continue
        kinds[name] = stillness(x.reshape(*x.shape[:2], -1)).kind
        if kinds[name] == "agree" and not np.all(still.get(name, False)):
            kinds[name] = ""
    return kinds


def _model_groups(mcmc: MCMC, samples: Samples) -> tuple[dict[str, Samples], DimNames]:
    """Return a model's data and their log likelihood, and names of plates' axes, by variable."""
    kernel = mcmc.sampler
    if not isinstance(kernel, Gibbs | ModelBlock):
        return {}, {}
    model = kernel.info.model if isinstance(kernel, ModelBlock) else kernel.model
    trace = prototype_trace(model, jax.random.key(0), mcmc._args, mcmc._kwargs)
    plates = _plate_dims(trace)
    observed = {
        variable_name(name): np.asarray(site["value"])
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"] and np.size(site["value"])
    }
    if not observed:
        return {}, plates
    groups = {"observed_data": observed}
    num_draws = math.prod(next(iter(samples.values())).shape[:2])
    if num_draws * sum(x.size for x in observed.values()) < _MOST_LIKELIHOODS:
        by_draw = _log_likelihoods(mcmc, model, samples)
        values = {variable_name(name): x for name, x in by_draw.items()}
        groups["log_likelihood"] = select(values, observed)
    return groups, plates


def _log_likelihoods(mcmc: MCMC, model: Callable, samples: Samples) -> Samples:
    """Return the log likelihood of each observation, with units summed out where they can be."""

    def pointwise(values):
        return block.pointwise(values, *mcmc._args, **mcmc._kwargs)

    kernel = mcmc.sampler
    blocks = [b for b, _ in kernel.blocks] if isinstance(kernel, Gibbs) else [kernel]
    for block in blocks:
        if isinstance(block, ModelBlock) and block.layers:
            draws = select(samples, block.info.latent)
            with contextlib.suppress(IntractableError):
                by_chain = partial(jax.lax.map, pointwise, batch_size=_MOST_DRAWS)
                return jax.device_get(jax.lax.map(by_chain, draws))
    return jax.device_get(
        log_likelihood(model, samples, *mcmc._args, batch_ndims=2, **mcmc._kwargs)
    )


def _run_meetings(mcmc: MCMC, attrs: Mapping[str, str]) -> xr.Dataset:
    """Return meeting times, and for a MaximalCoupling distances by sweep."""
    state = mcmc.last_state
    kernel = mcmc.sampler
    values = {}
    for name in ("meeting_time", "met"):
        value = np.asarray(getattr(state, name))
        value = value[None] if mcmc.num_chains == 1 else value
        dims = ["chain", *_row_dims(value.ndim - 1)]
        values[name] = (dims, value)
    values["lag"] = kernel.lag
    coords = {"chain": np.arange(mcmc.num_chains)}
    if isinstance(kernel, MaximalCoupling):
        fields = mcmc.get_extra_fields(group_by_chain=True)
        distance = np.asarray(fields["distance"])
        dims = ["chain", "sweep", *_row_dims(distance.ndim - 2)]
        values["distance"] = (dims, distance)
        # sweeps of the leading chain
        sweeps_left = mcmc.thinning * np.arange(distance.shape[1])[::-1]
        coords["sweep"] = int(np.max(state.t)) - sweeps_left
    return xr.Dataset(values, coords, attrs)


def summary(tree: xr.DataTree | xr.Dataset, **kwargs) -> pd.DataFrame:
    """Return :func:`arviz_stats.summary`, with values whose chains stand still marked as frozen.

    A chain stands still if it is constant, or from 50 draws on if the second half of
    its draws is. The column ``frozen_chains`` counts such chains. The column ``frozen``
    is True for a value whose draws have no effective sample size; it is then nan, and
    so is the Monte Carlo error. There are three cases:

    - All chains stand still, at different values: they are stuck, and R-hat is
      infinite.
    - Some stand still, and this is not chance (at different values, or with probability
      below 1e-5 at the rate at which the other chains leave that value): they are
      stuck. R-hat is ArviZ's.
    - All are constant at one value: the unit is nearly certain, or all chains are stuck
      at one place, which the draws cannot distinguish. R-hat is nan.

    A warning names the values of each case. Values are not rounded, unless
    ``round_to=2`` or the like is given.

    :param tree: result of :func:`to_datatree`, or any tree or dataset with ``chain``
        and ``draw``.
    :param kwargs: options of :func:`arviz_stats.summary` except ``fmt``.
    :return: one row per scalar.

    **References**

    1. Vehtari, Gelman, Simpson, Carpenter, Buerkner (2021), *Rank-normalization,
       folding, and localization: an improved R-hat for assessing convergence of MCMC*.

    **Example**

    >>> import arviz_base, numpy as np, warnings
    >>> x = np.stack([np.random.default_rng(0).normal(size=(2, 100)), np.ones((2, 100))], axis=-1)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     summary(arviz_base.from_dict({"posterior": {"x": x}}))["frozen"].tolist()
    [False, True]
    """
    import arviz_base  # imports matplotlib, if installed
    import arviz_stats

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # estimators divide by the variance within chains, which is zero for constant
        # values
        warnings.simplefilter("ignore", RuntimeWarning)
        options = {"round_to": "none", **kwargs}
        table = arviz_stats.summary(tree, fmt="wide", **options)
    selection = {name: kwargs[name] for name in _SELECTIONS if name in kwargs}
    extracted = arviz_base.extract(tree, combined=False, keep_dataset=True, **selection)
    draws = cast(xr.Dataset, extracted)
    if kwargs.get("coords") is not None:
        draws = draws.sel(kwargs["coords"])
    if "chain" not in draws.dims:
        draws = draws.expand_dims(chain=1)
    # with ArviZ's labels
    frame = arviz_base.dataset_to_dataframe(draws, sample_dims=["chain", "draw"])
    values = frame.to_numpy().reshape(draws.sizes["chain"], draws.sizes["draw"], -1)
    rows = [stillness(values[..., j : j + 1]) for j in range(values.shape[-1])]
    still = pd.DataFrame(rows, index=frame.columns, columns=Stillness._fields)
    still = still.loc[table.index]
    frozen = still["kind"] != ""
    affected = [c for c in table.columns if c.startswith(_NEEDS_MOVEMENT)]
    table[affected] = table[affected].astype(float)
    not_r_hat = [c for c in affected if c != "r_hat"]
    table.loc[frozen, not_r_hat] = np.nan
    if "r_hat" in affected:
        table.loc[still["kind"] == "agree", "r_hat"] = np.nan
        table.loc[still["kind"] == "apart", "r_hat"] = np.inf
    table["frozen"] = frozen
    table["frozen_chains"] = still["chains"]
    warn_still(still["kind"].to_dict(), "values", stacklevel=2)
    return table


def _from_long_run(result: LongDraws, dims: Dims, coords: Coords) -> xr.DataTree:
    """Return groups ``moments``, and ``posterior`` and ``sample_stats`` where draws were kept."""
    kernel = result.mcmc.sampler
    attrs = _attributes(kernel)
    still = getattr(result.last_state, "still", {})
    columns = {
        statistic: leaves_by_name(getattr(result.moments, statistic), "value")
        for statistic in _STATISTICS
    }
    values = {}
    kinds = {}
    for name, r_hat in columns["r_hat"].items():
        values[name] = np.stack([column[name] for column in columns.values()])
        kinds[name] = "agree" if np.all(still.get(name, False)) else ""
        if np.isinf(r_hat).any():
            kinds[name] = "apart"
    warn_still(kinds, "values", 3)
    # statistics in place of draws
    draws_like = {name: x[None] for name, x in values.items()}
    names = _dims_of(kernel, draws_like, dims, {})
    labels = _coords_of(kernel, draws_like, names, coords)
    variables = variable_names(draws_like)
    data = {
        variables[name]: (["statistic", *names[name]], x) for name, x in values.items()
    }
    names = {variables[name]: v for name, v in names.items()}
    moments = xr.Dataset(data, {"statistic": _STATISTICS})
    groups = {"/": xr.Dataset(), "moments": moments}
    draws = result.draws().children if result.num_kept else {}
    for group, data in draws.items():
        dataset = data.to_dataset()
        if group == "sample_stats":
            fields = {str(name): x for name, x in dataset.data_vars.items()}
            groups[group] = xr.Dataset(sample_statistics(fields))
            continue
        renamed = {}
        for name, x in dataset.data_vars.items():
            if len(names.get(str(name), ())) == x.ndim - 2:
                renamed |= dict(zip(x.dims[2:], names[str(name)]))
        groups[group] = dataset.rename(renamed)
    for group, data in groups.items():
        coords = {dim: v for dim, v in labels.items() if dim in data.dims}
        groups[group] = data.assign_coords(coords).assign_attrs(attrs)
    return xr.DataTree.from_dict(groups)


def _attributes(source: object) -> dict[str, str]:
    """Return a tree's attributes: library, version, and graph of a kernel or fit."""
    attrs = {
        "inference_library": "ebmpp",
        "inference_library_version": VERSION,
    }
    graph = getattr(source, "graph", None)
    if graph is not None:
        attrs["graph"] = repr(graph)
    if isinstance(source, Kernel):
        attrs["inference_kernel"] = type(source).__name__
        if isinstance(source, RowKernel) and source.caveat:
            attrs["inference_caveat"] = source.caveat
    return attrs


def sample_statistics(fields: Mapping[str, FieldValues]) -> dict[str, FieldValues]:
    """Return fields under ArviZ's names, which end with the block where two blocks share one."""
    result = {}
    for field, value in fields.items():
        prefix, _, last = field.rpartition(".")
        name = _ARVIZ_NAMES.get(last, last)
        if last == "potential_energy":
            name = "lp"
            value = -value
        if name in result:
            name = f"{name}_{prefix.removeprefix('block_states.').partition('.')[0]}"
        result[name] = value
    return result


def _dims_of(
    kernel: Kernel | None, samples: Samples, dims: Dims, plates: DimNames
) -> DimNames:
    """Return names of the dimensions after chain and draw: axes of rows, then of the block.

    :param dims: the user's names, by block, of its own axes or of all of them.
    :param plates: names of the first axes, by variable.
    """
    checks.names("name in dims", dims, samples)
    variables = variable_names(samples)
    blocks = {}
    if isinstance(kernel, RowKernel):
        blocks = kernel.graph.families
    elif isinstance(kernel, GraphBlock):
        blocks = kernel.binding.layouts
    result = {}
    for name, x in samples.items():
        count = x.ndim - len(_SAMPLE_DIMS)
        shape = blocks[name].shape if name in blocks else x.shape
        is_block = len(shape) <= count and x.shape[x.ndim - len(shape) :] == shape
        block_axes = len(shape) if is_block else count  # after axes of rows
        rows = _row_dims(count - block_axes)
        axes = plates.get(variables[name], [])[:block_axes]
        others = range(block_axes - len(axes))
        axes += [f"{variables[name]}_dim_{i}" for i in others]
        axes = list(dims.get(name, axes))
        result[name] = axes if len(axes) == count else rows + axes
        if len(result[name]) != count:
            expected = f"names of its {block_axes} axes"
            if rows:
                expected += f" after {rows}"
            raise checks.error(f"dims of {name!r}", expected, axes)
    used = {dim for names in result.values() for dim in names}
    if same := used.intersection(variables.values()):
        raise checks.error("dims", "names that no site has", sorted(same))
    return result


def _plate_dims(trace: Trace) -> DimNames:
    """Return names of the plates' axes, by variable, after the time axis of a scan.

    ArviZ takes a site's first axes for its plates, also where the first one is the
    time.
    """
    result = {}
    for name, site in trace.items():
        if site["type"] in ("sample", "deterministic"):
            variable = variable_name(name)
            frames = sorted(site["cond_indep_stack"], key=lambda frame: frame.dim)
            dims = [frame.name for frame in frames]
            dims += site.get("infer", {}).get("event_dims", [])
            times = [f"{variable}_dim_0"] if site.get("_control_flow_done") else []
            if dims:
                result[variable] = times + list(map(variable_name, dims))
    return result


def _row_dims(count: int) -> list[str]:
    """Return names of the leading axes of clamped values."""
    return ["row"] if count == 1 else [f"row_{i}" for i in range(count)]


def _coords_of(
    kernel: object, samples: Samples, dims: Dims, coords: Coords
) -> dict[str, Sequence[Any]]:
    """Return the user's coordinates, and by default the names of units."""
    known = [dim for b in samples for dim in dims[b]]
    checks.names("dimension in coords", coords, known)
    result = {}
    for b, names in _labels(kernel).items():
        if b in samples:
            # numbers or strings, which files and ArviZ accept
            is_plain = all(isinstance(name, str) for name in names)
            is_plain |= all(isinstance(name, int | float) for name in names)
            result[dims[b][-1]] = list(names if is_plain else map(str, names))
    return result | dict(coords)


def _labels(kernel: object) -> dict[str, tuple[Hashable, ...]]:
    """Return names of the units of blocks with one axis, or of the sites that are such blocks."""
    if isinstance(kernel, RowKernel):
        families = kernel.graph.families
        labels = kernel.graph.labels
        return {b: v for b, v in labels.items() if len(families[b].shape) == 1}
    labels = {}
    steps = (kernel,)
    if isinstance(kernel, CoupledComposite):
        steps = kernel.steps
    elif isinstance(kernel, Gibbs):
        steps = [block for block, _ in kernel.blocks]
    for step in steps:
        if not isinstance(step, GraphBlock):
            continue
        for site, layout in step.binding.layouts.items():
            block = layout.names[0]
            is_block = layout.flat(step.graph, [block]) == layout
            if is_block and len(layout.shape) == 1 and block in step.graph.labels:
                labels[site] = step.graph.labels[block]
    return labels
