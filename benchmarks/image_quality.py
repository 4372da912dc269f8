# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Images that Boltzmann machines draw, by one distance: five ways to train, after Taniguchi et al. (2023).

Deep Boltzmann machines by UCD-LMI, by PCD with a mean-field posterior, and by the same with centered
gradients; Gaussian-Bernoulli machines by PCD whose chains make Gibbs sweeps or Gibbs-Langevin sweeps. Each
draws images from noise, which are compared with held-out ones by the Frechet distance of a classifier's
hidden units. Next to it stands the FID that the paper prints.

**The two are not the same measure.** The FID is the distance in the features of the Inception network; ours
is in those of a small classifier, trained here. No figure of ours compares with a printed one: what may be
compared is the order of the methods. Machines and training are also far smaller than the paper's (6272 binary
units a layer, 100,000 steps).

Like is compared with like: classifier, samples and held-out images are all of two levels, grey ones being
thresholded at 1/2 (the paper has eight bits a pixel). A distance is told of the pixels as drawn, and of the
same states with every pixel at its mode given the latents, which takes away the noise of single pixels that
local modes do not have. Training rows in place of samples show what is zero here, and pixels drawn
independently what is bad.

``--only lmi lmi_biased lmi_binary lmi_whole lmi_gaussian`` takes away one part of UCD-LMI at a time, as the
paper's table 2 does.

``python benchmarks/image_quality.py`` takes MNIST from EBMPP_DATA_DIR; ``--data digits`` needs no download.
Each run is kept in ``raw/`` of the output folder; ``--draw`` makes picture and table of those again.

**References**

1. Taniguchi et al. (2023), *End-to-end training of deep Boltzmann machines by unbiased contrastive divergence
   with local mode initialization*, tables 1 and 2.
2. Montavon, Mueller (2012), *Deep Boltzmann machines and the centering trick*.
3. Liao et al. (2022), *Gaussian-Bernoulli RBMs without tears*.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import json
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple

import bands
import datasets
import image_pictures
from image_pictures import COLUMNS, LINES, shown
import local_modes
import numpy as np

import jax
import optax

import ebmpp
from ebmpp import PCD, Bernoulli, BlockedGibbs, FactorGraph, Spin
from ebmpp.contrib import LocalModeUCD
from ebmpp.contrib.sample_quality import ClassifierFeatures, frechet_distance
from ebmpp.estimators import Centered, Estimator, MeanField
from ebmpp.kernels import GibbsLangevin

root = Path(__file__).resolve().parents[1]
sys.path += [str(root), str(root / "models")]  # run as a file, it sees its own folder only
from models import gaussian_bernoulli  # noqa: E402
from shared import common  # noqa: E402

_SPLIT = 0  # seed of the division into training and held-out images

State = dict[str, Any]


class Method(NamedTuple):
    """A way to train, how the model is sampled, and what the paper prints of it."""

    label: str
    fid: float | None
    samplers: tuple[str, ...]
    pixels: str
    rate: float
    scheme: str = "gaussian"
    own: Estimator | None = None


#: A unit of 0 and 1 is (1 + spin) / 2: its weights are four times as large and take up to 16 times the rate.
METHODS = {
    "lmi": Method("UCD-LMI", 10.33, ("local modes", "Gibbs"), "spin", 0.01, "orthogonal"),
    "pcd": Method("PCD, mean field", None, ("Gibbs", "local modes"), "spin", 0.004),
    "centered": Method("centered PCD, mean field", 89.10, ("Gibbs", "local modes"), "binary", 0.05),
    "gibbs": Method("Gaussian-Bernoulli", 47.53, ("Gibbs",), "grey", 0.0005),
    "langevin": Method("Gaussian-Bernoulli, Langevin", 17.49, ("Gibbs-Langevin",), "grey", 0.0005),
}
_TABLE_1 = tuple(METHODS)
_MODES = ("local modes",)
METHODS |= {
    name: Method(f"UCD-LMI, {told}", fid, _MODES, pixels, rate, scheme, own)
    for name, told, fid, pixels, rate, scheme, own in (
        ("lmi_biased", "no correction", 112.1, "spin", 0.01, "orthogonal", local_modes.Uncorrected()),
        ("lmi_binary", "units of 0 and 1", 30.27, "binary", 0.16, "orthogonal", LocalModeUCD()),
        ("lmi_whole", "nothing summed out", 13.70, "spin", 0.01, "orthogonal", LocalModeUCD(marginalize=())),
        ("lmi_gaussian", "no orthogonal weights", 18.20, "spin", 0.01, "gaussian", LocalModeUCD()),
    )
}


class Data(NamedTuple):
    """Images of two levels, the grey ones, and the network that compares."""

    train: np.ndarray
    held_out: np.ndarray
    grey: gaussian_bernoulli.Images
    edge: float
    """The grey level, spread over its step, from which on a pixel counts as on."""
    features: ClassifierFeatures


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    datasets.option(parser, "mnist")
    add("--rows", type=int, help="images at most, those held out included; default: all")
    add("--only", nargs="+", choices=tuple(METHODS), default=list(_TABLE_1))
    add("--sides", type=int, nargs=2, default=(200, 200), help="units of the latent layers; their sum in one")
    add("--steps", type=int, default=10_000)
    add("--batch-size", type=int, default=100)
    add("--chains", type=int, default=100, help="persistent chains, or pairs")
    add("--samples", type=int, default=2000, help="as many training rows at most")
    add("--sweeps", type=int, default=300, help="of each chain, from noise to its sample")
    add("--epochs", type=int, default=20, help="of the classifier")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--name", default="", help="of this version, put at the end of the names of its files")
    add("--out", type=Path, default=Path("benchmarks/report"))
    add("--draw", action="store_true", help="run nothing; draw what there is")
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size", "chains", "sweeps", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, not {getattr(args, name)}")
    if min(args.sides) < 1 or args.samples < 40:
        parser.error("--sides are positive, and --samples at least 40, which the standard error takes")
    return args


def load(args: argparse.Namespace) -> Data:
    """One image in six held out; the network is trained on the others."""
    rows, labels = datasets.read(args.data, labels=True)
    rng = np.random.default_rng(_SPLIT)
    order = rng.permutation(len(rows))[: args.rows]
    levels = 17 if args.data == "digits" else 256
    binary, cut = ebmpp.data.binarize(rows)[order], len(order) // 6
    grey = _standardised(gaussian_bernoulli.spread(rows[order], levels, rng))
    edge = (1 + (levels - 1) // 2) / levels  # what binarize makes of whole levels
    train = binary[cut:]
    features = ClassifierFeatures.fit(train, labels[order[cut:]], num_epochs=args.epochs)
    print(f"classifier: {features.accuracy:.1%} right on rows held out from it", flush=True)
    return Data(train, binary[:cut], grey, edge, features)


def _standardised(images: gaussian_bernoulli.Images) -> gaussian_bernoulli.Images:
    """Every pixel of variance 1, so that Adam's steps, all of one size, are small for each of them."""
    own = images.train.std(0)
    scale = images.scale * own
    return images._replace(train=images.train / own, held_out=images.held_out / own, scale=scale)


# -- models --------------------------------------------------------------------------------------


def declare(name: str, data: Data, args: argparse.Namespace) -> FactorGraph:
    """The machine: two latent layers, or one with as many units for grey pixels."""
    pixels, sides = data.train.shape[1], args.sides
    if METHODS[name].pixels == "grey":
        return gaussian_bernoulli.declare(pixels, sum(sides))
    family = Spin if METHODS[name].pixels == "spin" else Bernoulli
    return ebmpp.layered(v=family(pixels), h1=family(sides[0]), h2=family(sides[1]))


def estimator(name: str, graph: FactorGraph, chains: int) -> Estimator:
    """The estimator of a method."""
    if name.startswith("lmi"):
        return dataclasses.replace(METHODS[name].own or LocalModeUCD(), num_pairs=chains)
    if METHODS[name].pixels == "grey":
        moves = ebmpp.moves.langevin_sweep(graph) if name == "langevin" else None
        return PCD(num_chains=chains, moves=moves)
    pcd = PCD(num_chains=chains, posterior=MeanField(10))
    return Centered(pcd) if name == "centered" else pcd


def train(name: str, graph: FactorGraph, data: Data, seed: int, args: argparse.Namespace) -> ebmpp.Fit:
    """Under a rate that decays along a cosine: plain steps, and Adam's for grey pixels."""
    method = METHODS[name]
    schedule = optax.cosine_decay_schedule(method.rate, args.steps, alpha=0.04)
    rows, options = data.train, {"scheme": method.scheme, "optimizer": optax.sgd(schedule)}
    if method.pixels == "spin":
        rows = 2 * rows - 1
    if method.pixels == "grey":
        rows = data.grey.train
        start = gaussian_bernoulli.start(rows, sum(args.sides), seed)
        options = {"params": start, "optimizer": optax.adam(schedule)}
    return ebmpp.fit(
        graph,
        rows,
        estimator=estimator(name, graph, args.chains),
        num_steps=args.steps,
        batch_size=args.batch_size,
        rng_key=jax.random.key(seed),
        progress_bar=False,
        **options,
    )


def draw_from(sampler: str, graph: FactorGraph, params: Any, seed: int, args: argparse.Namespace) -> State:
    """States, each from a start of its own in noise."""
    if sampler == "local modes":
        key = jax.random.key(1000 + seed)
        return ebmpp.local_search(graph, params, rng_key=key, num_rows=args.samples).state
    kernel = GibbsLangevin(graph) if sampler == "Gibbs-Langevin" else BlockedGibbs(graph)
    run = common.chains(kernel, params, 1000 + seed, warmup=args.sweeps - 1, count=args.samples)
    return run.get_samples()


def as_images(name: str, data: Data) -> Callable[[Any], np.ndarray]:
    """From pixels of a method's units to two levels."""
    if METHODS[name].pixels == "grey":
        return lambda v: (data.grey.grey(v) >= data.edge).astype(np.float32)
    edge = 0.0 if METHODS[name].pixels == "spin" else 0.5
    return lambda v: (np.asarray(v) > edge).astype(np.float32)


# -- measures ------------------------------------------------------------------------------------


def measure(images: np.ndarray, data: Data) -> dict[str, float]:
    """The distance from held-out images, and that of the shares of labels which the network sees."""
    found = frechet_distance(images, data.held_out, features=data.features, extrapolate=True)
    share = lambda rows: np.bincount(data.features.predict(rows), minlength=10) / len(rows)
    labels = np.abs(share(images) - share(data.held_out)).sum() / 2
    values = {"distance": found.value, "extrapolated": found.extrapolated, "error": found.standard_error}
    return {k: float(f"{v:.4g}") for k, v in (values | {"labels": labels}).items()}


def run(name: str, seed: int, data: Data, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A method in numbers, by sampler."""
    graph, made, begin = declare(name, data, args), [], time.monotonic()
    fit = train(name, graph, data, seed, args)
    jax.block_until_ready(fit.params)
    told = {"method": name, "seed": seed, "steps": args.steps, "sides": list(args.sides)}
    told["train_seconds"] = round(time.monotonic() - begin, 1)
    for metric in ("corrected", "acceptance"):
        if metric in fit.history:
            told[metric] = float(fit.history[metric].mean())
    to_images = as_images(name, data)
    for sampler in METHODS[name].samplers:
        begin = time.monotonic()
        state = draw_from(sampler, graph, fit.params, seed, args)
        eta = graph.natural_parameters(fit.params, state, "v")
        drawn, modes = to_images(state["v"]), to_images(graph.families["v"].mode(eta))
        one = told | {"sampler": sampler, "sample_seconds": round(time.monotonic() - begin, 1)}
        one |= {"drawn": measure(drawn, data), "modes": measure(modes, data)}
        print(line(one), flush=True)
        made.append(one | {"shown": shown(drawn, modes)})
    path = raw(args, f"{name}-{seed}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made), encoding="utf-8")
    return made


def references(data: Data, args: argparse.Namespace) -> None:
    """What is zero here, and what is bad."""
    rng = np.random.default_rng(0)
    rate = data.train.mean(0)
    rows = {
        "training rows": data.train[rng.permutation(len(data.train))[: args.samples]],
        "independent pixels": (rng.uniform(size=(args.samples, len(rate))) < rate).astype(np.float32),
    }
    made: dict[str, Any] = {
        "data": datasets.tag(args.data),
        "samples": args.samples,
        "held_out": len(data.held_out),
        "classifier": {"units": 64, "accuracy": round(data.features.accuracy, 4)},
        "runs": [
            {"sampler": n, "drawn": measure(v, data), "shown": shown(v, v[COLUMNS * LINES :])}
            for n, v in rows.items()
        ],
    }
    path = raw(args, "references")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made), encoding="utf-8")


def raw(args: argparse.Namespace, name: str) -> Path:
    """Where a run is kept."""
    return args.out / "raw" / f"{stem(args)}-{datasets.tag(args.data)}-{name}.json"


def stem(args: argparse.Namespace) -> str:
    """What files are named by."""
    return "_".join(filter(None, ["image_quality", args.name]))


# -- the report ----------------------------------------------------------------------------------


def label(made: dict[str, Any]) -> str:
    """Method and sampler."""
    if "method" not in made:
        return made["sampler"]
    name = f"{METHODS[made['method']].label}: {made['sampler']}"
    return name + (f", seed {made['seed']}" if made["seed"] else "")


def line(made: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [f"{label(made):<48}"]
    for part in ("drawn", "modes"):
        value = made.get(part)
        told = f"{value['extrapolated']:.1f} +- {value['error']:.1f}" if value else ""
        cells.append(f"{value['distance']:>9.1f} {told:>16}" if value else " " * 26)
    method = METHODS.get(made.get("method", ""))
    fid = method.fid if method and made["sampler"] == method.samplers[0] else None
    return "".join(cells) + f"{made['drawn']['labels']:>8.2f}{'' if fid is None else fid:>8}"


def table(runs: Sequence[dict[str, Any]]) -> str:
    """All rows."""
    head = f"{'':<48}{'as drawn':>9} {'extrapolated':>16}{'modes':>9} {'extrapolated':>16}{'labels':>8}"
    return "\n".join([f"{head}{'FID *':>8}", *map(line, runs), "* as printed: another measure"])


def told(made: dict[str, Any]) -> str:
    """What the pictures are of."""
    runs = [one for one in made["runs"] if "method" in one]
    steps, seeds = {one["steps"] for one in runs}, {one["seed"] for one in runs}
    size = "-".join(map(str, runs[0]["sides"])) if runs else ""
    return f"{made['data']} in two levels, latent {size}, {max(steps):,} steps, {bands.over(len(seeds))}"


def pictures(made: dict[str, Any], kept: Path) -> None:
    """Distances; and images where these are there."""
    image_pictures.distances(made["runs"], label, told(made), kept.with_name(f"{kept.stem}_distances.png"))
    if all("shown" in one for one in made["runs"]):
        image_pictures.images(made["runs"], label, told(made), kept.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, then report."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.draw:
        data = load(args)
        references(data, args)
        for name in args.only:
            for seed in args.seeds:
                run(name, seed, data, args)
    kept = args.out / f"{stem(args)}{'' if args.data == 'mnist' else '_' + datasets.tag(args.data)}.json"
    if raw(args, "references").exists():
        made = json.loads(raw(args, "references").read_text())
        for name in METHODS:
            for path in sorted(raw(args, "").parent.glob(raw(args, f"{name}-*").name)):
                made["runs"] += json.loads(path.read_text())
    elif kept.exists():
        made = json.loads(kept.read_text(encoding="utf-8"))
    else:
        raise SystemExit(f"no runs in {args.out / 'raw'}: run some first, without --draw")
    pictures(made, kept)
    print(table(made["runs"]))
    made["runs"] = [{k: v for k, v in one.items() if k != "shown"} for one in made["runs"]]
    kept.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
