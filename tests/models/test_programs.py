# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every program in models/ runs from its command line, writes its files, and refuses
invalid options."""

from collections.abc import Callable, Mapping
import dataclasses
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import xarray as xr

import jax

import ebmpp
from helpers import often
from models import (
    categorical,
    conditional,
    convolutional,
    custom_energy,
    dbm,
    denoising,
    gaussian_bernoulli,
    harmonium,
    ising,
    rbm,
    semi_restricted,
    third_order,
)

pytestmark = pytest.mark.nightly

FEW = "--steps=4 --batch-size=10 --num-pairs=4 --no-progress"
Check = Callable[[xr.DataTree], object]


def has(variable: str) -> Check:
    """Return a check that some group of a tree has a variable."""
    return lambda tree: (
        variable in {name for node in tree.subtree for name in node.data_vars}
    )


def is_denoised(tree: xr.DataTree) -> bool:
    x = tree.posterior.x
    is_binary = set(np.unique(x)) <= {0.0, 1.0}
    return (
        x.shape[:3] == (2, 30, 2)
        and is_binary
        and bool((tree.posterior.scale > 0).all())
    )


@dataclasses.dataclass
class Run:
    """A short run of a program, and its pictures, trees, saved models and printed phrases.

    :param printed: how often each phrase is printed; None for at least once.
    """

    program: ModuleType
    argv: str
    pictures: str
    printed: Mapping[str, int | None]
    trees: Mapping[str, Check] = dataclasses.field(default_factory=dict)
    saved: Mapping[str, ebmpp.FactorGraph] = dataclasses.field(default_factory=dict)


HISTORY = {"history.nc": has("gradient_norm")}


def dbm_run(estimator: str, sides: str) -> Run:
    printed = {
        "accepted 0 of the proposals": 0 if estimator != "lmi" else None,
        "wrote": 4,
    }
    argv = f"--estimator={estimator} --sides {sides} {FEW}"
    return Run(dbm, argv, "samples completions history", printed, HISTORY)


def gaussian_run(estimator: str) -> Run:
    printed = {"per image, exact": None, "of the exact variance": None, "wrote": 5}
    is_of_digits = lambda tree: tree["posterior"]["v"].shape[-1] == 64
    argv = f"--estimator={estimator} --latent=3 {FEW}"
    return Run(
        gaussian_bernoulli,
        argv,
        "samples params learning_curve",
        printed,
        {"samples.nc": is_of_digits},
    )


def harmonium_run(kind: str) -> Run:
    printed = {
        "mean average precision": 4,
        "wrote": 3,
        "perplexity": None if kind == "replicated" else 0,
    }
    return Run(
        harmonium,
        f"--kind={kind} --words=60 --tokens=8 --latent=4 {FEW}",
        "retrieval history",
        printed,
    )


def semi_restricted_run(estimator: str) -> Run:
    folders = [kind.replace(" ", "_") for kind in semi_restricted.KINDS]
    pictures = " ".join(
        ["samples learning_curves meeting_times", *(f"{f}/weights" for f in folders)]
    )
    argv = f"--estimator={estimator} --latent=3 --sweeps=20 --temperatures=20 {FEW}"
    argv += " --num-pairs=30"  # fewer particles warn
    printed = {"log-likelihood, held out": 3, "the same, exactly": 1}
    trees = {f"{f}/history.nc": has("gradient_norm") for f in folders}
    return Run(semi_restricted, argv, pictures, printed, trees)


FILTERS = f"--filters=3 --unbiased-steps=2 --temperatures=20 {FEW}"
NOT_AFFINE = "must be affine in the statistics of each unit of block 'v'"
RUNS = {
    "categorical": Run(
        categorical,
        f"--data=wine --latent=5 --sweeps=20 {FEW}",
        "completions",
        {"wrote": 3, "chained regressions": None},
        saved={"table.ebmpp": categorical.declare(13, 4, 5)},
    ),
    "conditional": Run(
        conditional,
        f"--latent=6 {FEW}",
        "classes halves",
        {"wrote": 8, "logistic regression": None},
        {"hybrid.nc": has("conditional_log_likelihood")},
        {"hybrid.ebmpp": conditional.declare(64, 6)},
    ),
    "denoising": Run(
        denoising,
        "--images=2 --warmup=20 --samples=30 --chains=2 --latent=4 --steps=5 --no-progress",
        "ising rbm",
        {"pixels wrong": 2, "scale": None},
        {"ising.nc": is_denoised, "rbm.nc": is_denoised},
    ),
    "ising": Run(
        ising,
        "--side=8 --num-chains=4 --sweeps=20 --num-pairs=4 --no-progress",
        "onsager states meeting_times",
        {"pairs met": 8},
        {"ising.nc": lambda tree: tree["meeting"].meeting_time.shape == (8, 4)},
    ),
    "convolutional": Run(
        convolutional,
        FILTERS,
        "samples filters history",
        {"log-likelihood, held out": None},
        HISTORY,
    ),
    "third order": Run(
        third_order,
        f"--latent=4 --factors=5 {FEW}",
        "analogies filters",
        {"move, carried over": None},
        HISTORY,
    ),
    "custom energy": Run(
        custom_energy, f"--latent=3 {FEW}", "samples", {NOT_AFFINE: None}, HISTORY
    ),
    "unsupervised": Run(
        custom_energy, f"--latent=3 --unsupervised {FEW}", "samples", {"Rand": None}
    ),
    **{
        f"dbm {estimator} 12 8": dbm_run(estimator, "12 8")
        for estimator in ("pcd", "centered", "lmi")
    },
    "dbm pcd 12": dbm_run("pcd", "12"),
    "dbm ucd 6 5 4": dbm_run("ucd", "6 5 4"),
    **{
        f"gaussian {estimator}": gaussian_run(estimator)
        for estimator in ("ucd", "langevin")
    },
    **{
        f"harmonium {kind}": harmonium_run(kind)
        for kind in ("replicated", "poisson", "presence")
    },
    **{
        f"semi-restricted {estimator}": semi_restricted_run(estimator)
        for estimator in ("pcd", "ucd")
    },
}


CHEAP = (
    "categorical",
    "conditional",
    "custom energy",
    "dbm pcd 12",
    "gaussian langevin",
)


@pytest.mark.parametrize("name", often(RUNS, *CHEAP))
def test_a_short_run_writes_its_files(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gaussian_bernoulli, "_SWEEPS", 20)
    run = RUNS[name]
    run.program.main([*run.argv.split(), f"--out={tmp_path}"])
    for picture in run.pictures.split():
        assert (tmp_path / f"{picture}.png").stat().st_size > 5000
    for file, check in run.trees.items():
        with xr.open_datatree(tmp_path / file, engine="h5netcdf") as tree:
            assert check(tree), file
    for file, declared in run.saved.items():
        graph, params = ebmpp.load(tmp_path / file)
        assert graph == declared and all(
            np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)
        )
    printed = capsys.readouterr().out
    for phrase, count in run.printed.items():
        assert phrase in printed if count is None else printed.count(phrase) == count, (
            phrase
        )


LIKELIHOOD = "--recipe=likelihood"
REFUSED = [
    (custom_energy, "--latent=15", "--latent must be at most 14"),
    (dbm, "--steps=0", "--steps must be at least 1"),
    (
        dbm,
        "--sides 9 9 9 9 9",
        "--sides must be one to 4 positive numbers, got [9, 9, 9, 9, 9]",
    ),
    (dbm, "--cost=1", "--cost must be above 1"),
    (dbm, f"{LIKELIHOOD} --decay=-1", "--decay must be a number of at least 0"),
    (dbm, f"{LIKELIHOOD} --grey", "without --grey, and a centered --estimator"),
    (denoising, "--images=0", "--images must be at least 1"),
    (
        gaussian_bernoulli,
        "--estimator=langevin --step-size=-1",
        "must be a number above 0, got -1.0",
    ),
    (ising, "--side=2", "--side must be at least 3"),
    (rbm, "--latent 0", "--latent must be at least 1"),
    (rbm, "--rate nan", "--rate must be a positive number"),
    (rbm, "--estimator cd --lag 5", "--lag belongs to coupled chains"),
    (rbm, "--estimator cd --k 0", "k must be an int of at least 1, got 0"),
    (rbm, "--lag 0", "lag must be an int of at least 1"),
    (rbm, "--data nowhere.idx", "nowhere.idx"),
    (rbm, "--data mnist --data-dir nowhere", "got nowhere or nowhere/mnist"),
    (rbm, "--particles 1", "--particles must be at least 2"),
    (semi_restricted, "--neighbours=6", "invalid choice: 6"),
    (semi_restricted, "--sweeps=2", "--sweeps must be at least 3"),
]


@pytest.mark.parametrize(
    ("program", "argv", "message"), REFUSED, ids=lambda value: str(value)[:30]
)
def test_invalid_options_are_refused(
    program: ModuleType,
    argv: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        program.main([*argv.split(), "--out", str(tmp_path / "out")])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
