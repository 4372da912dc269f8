# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every figure and table of the four papers: its program, with its options, and what became of it.

``python benchmarks/papers.py --list`` prints this table.
"""

from row import AS_PRINTED, NEEDS_DATA, Row, State, smaller


def _(text: str) -> tuple[str, ...]:
    """Options, as one writes them."""
    return tuple(text.split())


QIU, TANIGUCHI = "Qiu et al. (2020)", "Taniguchi et al. (2023)"
UPADHYA, BREULEUX = "Upadhya, Sastry (2017)", "Breuleux et al. (2011)"
_SEEDS = "--seeds " + " ".join(map(str, range(20)))
_TEN = "--seeds " + " ".join(map(str, range(10)))
_TINY = "--data digits --latent 16 --batch-size 100 --epochs 1 --points 2 --temperatures 30"
_SMALL = "--latent 100 --rows 7200 --name small --temperatures 500"
_ABLATION = "--only lmi lmi_biased lmi_binary lmi_whole lmi_gaussian"
_IMAGES = "--data digits --epochs 5 --chains 10 --sides 20 20 --steps 40 --samples 100 --sweeps 10"
_NEW = "the program is new, and only its quick settings were run"


def _mnist(
    name: str,
    printed: tuple[str, ...],
    what: str,
    experiment: str,
    small: str,
    epochs: int,
    state: State,
    minutes: float | None = None,
) -> Row:
    """A row of ``mnist_rbm.py``: of Upadhya and Sastry, 784x500."""
    full = f"{experiment} --epochs {epochs} --points 50 --temperatures 10000 {_TEN}"
    quick, own = (_(f"{experiment} {_TINY}"),), (_(f"{experiment} {small}"),)
    script = "benchmarks/mnist_rbm"
    return Row(name, UPADHYA, printed, what, script, quick, own, (_(full),), state, minutes)


_ROWS = (
    Row(
        "u5",
        QIU,
        ("figure 2",),
        "bars and stripes 4x4 at rate 0.1: UCD, CD, PCD, and PCD first",
        "benchmarks/bars_and_stripes",
        (_("--steps 1000 --every 250 --only cd1 pcd"),),
        (
            _(f"--only cd1 cd5 pcd --every 100 --variance-every 1000 --steps 12000 {_SEEDS}"),
            _(
                "--only ucd_few truncated ucd1 persistent --every 50 --variance-every 500 --steps 3000 "
                "--seconds 100 --seeds 0 1 2"
            ),
            _("--only pcd_ucd --steps 6000 --every 50 --seconds 300"),
        ),
        (_(f"--only ucd ucd1 truncated persistent pcd_ucd cd1 cd5 cd20 pcd --steps 50000 {_SEEDS}"),),
        smaller("20 seeds, 5 for UCD, where the paper has 100; rate 0.1"),
    ),
    Row(
        "u5p",
        QIU,
        ("figure 2", "figure 6", "table 1"),
        "the same at the printed rate 0.01, of the mean and of the sum over the 32 rows: CD-1 to CD-20, "
        "discarded draws, costs",
        "benchmarks/bars_and_stripes",
        (_("--rate 0.01 --name printed --steps 200 --every 50 --only cd1 cd2 truncated --chains 100"),),
        (
            _(
                "--rate 0.01 --name printed --steps 40000 --every 500 --only cd1 cd2 cd5 cd10 cd20 pcd "
                "--seeds 0 1 2 3 4"
            ),
            _(
                "--rate 0.01 --name printed --steps 40000 --every 500 --only truncated --seeds 0 1 "
                "--seconds 400"
            ),
            _(
                "--rate 0.32 --name printed_sum --steps 2500 --every 50 --chains 1000 --seeds 0 1 2 "
                "--only cd1 cd2 cd5 cd10 cd20 pcd truncated"
            ),
        ),
        (
            _(
                "--rate 0.01 --name printed --steps 50000 --every 500 --chains 1000 "
                f"--only cd1 cd2 cd5 cd10 cd20 pcd truncated {_SEEDS}"
            ),
        ),
        smaller(_NEW),
    ),
    Row(
        "u6",
        QIU,
        ("figure 3", "figure 7", "figure 8", "figure 9", "table 2"),
        "a simulated 200x20 model fitted with 100 units: CD-1 to CD-10, PCD, UCD, PCD first; meeting times, "
        "discarded draws, costs",
        "benchmarks/simulated_rbm",
        (_("--steps 10 --points 2 --temperatures 30 --only cd1 pcd_ucd --visible 20 --latent 8 --truth 5"),),
        (_("--steps 1500 --points 8 --temperatures 1000 --seconds 150 --seeds 0 1 2"),),
        (_(f"--steps 10000 {_TEN}"),),
        smaller("3000 steps of CD-1, PCD and UCD, one seed; CD-2 to CD-10 and figure 9 quick settings alone"),
    ),
    Row(
        "u10",
        QIU,
        ("figure 5",),
        "meeting times on untrained 500x100 models, by coupling",
        "benchmarks/meeting_times",
        (_("untrained --pairs 50 --repeats 1"),),
        (_("untrained"),),
        (_("untrained"),),
        AS_PRINTED,
    ),
    Row(
        "u8t",
        QIU,
        ("figure 12",),
        "variance of the gradient of b, c and W along training, and its cost",
        "benchmarks/gradient_variance",
        (_("training --steps 10 --points 2 --repeats 3 --truth 5 --only cd1 published"),),
        (_("training --steps 1000 --points 10 --repeats 10 --seconds 100 --seeds 0 1 2"),),
        (_(f"training --steps 10000 --points 100 --repeats 20 {_TEN}"),),
        smaller(_NEW),
    ),
    Row(
        "u9",
        QIU,
        ("figure 4", "figure 10", "figure 11", "table 3"),
        "784x1000 on MNIST: CD-1 to CD-30, PCD, UCD, PCD first; meeting times, discarded draws, costs",
        "benchmarks/mnist_rbm",
        (_(f"ucd {_TINY} --only cd1 cd20 pcd published ucd pcd_ucd"),),
        (_("ucd --epochs 2 --points 4 --seconds 300"),),
        (_("ucd --epochs 40 --points 50 --temperatures 10000"),),
        smaller("MNIST, four epochs where the paper has some forty, one seed; CD-20 and CD-30 not run"),
    ),
    Row(
        "u9f",
        QIU,
        ("figure 4", "figure 10", "figure 11", "table 3"),
        "the same on Fashion-MNIST",
        "benchmarks/mnist_rbm",
        (_(f"ucd {_TINY} --only cd1 published"),),
        (_("ucd --data fashion_mnist --name fashion --epochs 2 --points 4 --seconds 300"),),
        (_("ucd --data fashion_mnist --name fashion --epochs 40 --points 50 --temperatures 10000"),),
        NEEDS_DATA,
    ),
    Row(
        "l7",
        TANIGUCHI,
        ("figure 1",),
        "search and meeting times on orthogonal weights, from uniform draws and from local modes",
        "benchmarks/meeting_times",
        (_("orthogonal --sizes 2 10"),),
        (_("orthogonal"),),
        (_("orthogonal --sizes 1 2 5 10 15 20 25 50 75 100 150 200"),),
        AS_PRINTED,
    ),
    Row(
        "l8",
        TANIGUCHI,
        ("table 1",),
        "MNIST by deep and Gaussian-Bernoulli machines, by a Frechet distance that is not the FID",
        "benchmarks/image_quality",
        (_(_IMAGES),),
        (_("--steps 4000"),),
        (_("--sides 6272 6272 --steps 100000 --samples 10000 --sweeps 1000"),),
        smaller("784-200-200 of two levels and 4,000 steps, where the paper has 6272-6272-6272 and 100,000"),
        8.5,
    ),
    Row(
        "l8a",
        TANIGUCHI,
        ("table 2",),
        "UCD-LMI without each of its parts, the correction among them, by that distance",
        "benchmarks/image_quality",
        (_(f"{_IMAGES} {_ABLATION}"),),
        (_(f"--steps 2000 {_ABLATION}"),),
        (_(f"--sides 6272 6272 --steps 100000 --samples 10000 --sweeps 1000 {_ABLATION}"),),
        smaller(_NEW),
    ),
    Row(
        "lmi",
        TANIGUCHI,
        ("table 2",),
        "the same by exact log-likelihood on digits",
        "benchmarks/local_modes",
        (_("--steps 40 --seeds 0 --only lmi biased pcd"),),
        (_("--steps 2000 --rate 0.005"),),
        (_("--steps 100000"),),
        smaller("64-12-12 on 8x8 digits, 2,000 steps, so that the likelihood is exact"),
        8,
    ),
    Row(
        "l6",
        TANIGUCHI,
        ("figure 2", "figure 3"),
        "samples and completed halves of a deep machine by UCD-LMI; by --estimator pcd the baseline",
        "models/dbm",
        (_("--data digits --sides 12 8 --steps 4 --batch-size 10 --num-pairs 4 --no-progress"),),
        (_("--data mnist --sides 500 500 --steps 2000 --no-progress"),),
        (
            _("--data mnist --grey --sides 6272 6272 --steps 100000 --rate 0.01 --no-progress"),
            _("--data mnist --grey --sides 6272 6272 --steps 100000 --estimator pcd --no-progress"),
        ),
        smaller("784-500-500 of two levels and 8,000 steps on MNIST, 19 minutes"),
    ),
    Row(
        "l5",
        TANIGUCHI,
        ("table 1",),
        "CIFAR-10 (grey, two levels)",
        "benchmarks/image_quality",
        (_(f"{_IMAGES} --only lmi"),),
        (_("--data cifar10 --rows 12000 --only lmi centered --steps 2000"),),
        (_("--data cifar10 --only lmi centered --sides 10000 10000 --steps 100000"),),
        NEEDS_DATA,
    ),
    Row(
        "d4",
        UPADHYA,
        ("figure 1", "figure 2"),
        "bars and stripes 3x3, shifting bar: CD, PCD, centered, S-DCP, CS-DCP; a control; Algorithms 3 and 4 "
        "as printed",
        "benchmarks/dc_programming",
        (_("--trials 2 --epochs 500"),),
        (_("--trials 25 --epochs 50000"),),
        (_("--trials 25 --epochs 50000"),),
        smaller("10 trials of 30,000 epochs; the algorithms as printed by quick settings alone"),
    ),
    _mnist(
        "d5",
        ("figure 3",),
        "784x100 on 6,000 images of MNIST: ten trials of 20 epochs, with the control",
        "dc",
        f"{_SMALL} --epochs 20 --points 5 {_TEN}",
        200,
        smaller(_NEW),
    ),
    _mnist(
        "d5l",
        ("figure 3",),
        "784x500 on MNIST, one run; held-out likelihood along the way",
        "dc",
        "--epochs 3 --points 6",
        200,
        smaller("one epoch where the paper has 200, one trial, without the control"),
    ),
    _mnist(
        "d6",
        ("figure 4",),
        "the same on OMNIGLOT",
        "dc",
        "--data omniglot --name omniglot --epochs 5 --points 5",
        200,
        NEEDS_DATA,
    ),
    _mnist(
        "d7",
        ("figure 5",),
        "batches of 1000: spectral descent at five rates, CD, S-DCP, CS-DCP",
        "spectral",
        f"{_SMALL} --epochs 60 --points 6",
        250,
        smaller("784x500, two epochs where the paper has 250, one trial and one rate"),
    ),
    _mnist(
        "d8a",
        ("figure 6a",),
        "S-DCP and CS-DCP by learning rate",
        "rates",
        f"{_SMALL} --epochs 20 --points 5 --seeds 0 1 2",
        200,
        smaller(_NEW),
    ),
    _mnist(
        "d8b",
        ("figure 6b",),
        "S-DCP and CS-DCP by d and K', d K' = 24",
        "inner",
        f"{_SMALL} --epochs 20 --points 5 --seeds 0 1",
        200,
        smaller(_NEW),
    ),
    _mnist(
        "d9a",
        ("figure 7a",),
        "S-DCP by batch size",
        "batches",
        f"{_SMALL} --epochs 20 --points 5 --seeds 0 1 2",
        200,
        smaller(_NEW),
    ),
    _mnist(
        "d9b",
        ("figure 7b", "table 1"),
        "S-DCP and CS-DCP by the first params",
        "starts",
        f"{_SMALL} --epochs 20 --points 5 --seeds 0 1 2",
        200,
        smaller(_NEW),
    ),
    Row(
        "r4",
        BREULEUX,
        ("figure 1", "figure 2"),
        "samples, and indirect sampling likelihood by their number: Gibbs, rates-FPCD and its kin, tempering",
        "benchmarks/mixing",
        (_("--steps 200 --samples 200 --tune 50 --only gibbs fpcd"),),
        ((), _("--data mnist --hidden 500 --steps 10000 --samples 20000")),
        (_("--data mnist --hidden 500 --steps 10000 --samples 200000"),),
        smaller("20,000 samples (200,000 of Gibbs), MNIST and 8x8 digits, one model of PCD, one seed"),
    ),
    Row(
        "r2",
        BREULEUX,
        ("figure 2", "figure 3 left"),
        "the same on USPS",
        "benchmarks/mixing",
        (_("--steps 200 --samples 200 --tune 50 --only gibbs fpcd"),),
        (_("--data usps --hidden 200 --samples 10000"),),
        (_("--data usps --hidden 500 --steps 10000 --samples 200000"),),
        NEEDS_DATA,
    ),
    Row(
        "r3",
        BREULEUX,
        ("figure 3 right",),
        "the same on a bag of words",
        "benchmarks/mixing",
        (_("--steps 200 --samples 200 --tune 50 --only gibbs fpcd"),),
        (_("--data bag_of_words --hidden 200 --samples 10000 --only gibbs fpcd"),),
        (_("--data bag_of_words --hidden 500 --steps 10000 --samples 200000 --only gibbs fpcd"),),
        NEEDS_DATA,
    ),
    Row(
        "u8",
        "ours, after Qiu et al. (2020)",
        (),
        "what holds the variance of a gradient, and its cost",
        "benchmarks/gradient_variance",
        (_("--visible 6 --latent 4 --repeats 20 --pairs 50"),),
        ((),),
        (_("--repeats 2000"),),
        AS_PRINTED,
    ),
    Row(
        "ais",
        "Grosse et al. (2015)",
        (),
        "coverage of annealed importance sampling's bracket; a diverging model by it and by what flatters",
        "benchmarks/bracket",
        (_("--repeats 2 --temperatures 30 --steps 500 --points 2"),),
        ((),),
        (_("--repeats 100 --temperatures 20 300 10000"),),
        smaller("20 repeats, small models whose log Z is exact"),
    ),
)
ROWS = {row.name: row for row in _ROWS}
