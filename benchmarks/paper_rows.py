# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every figure and table of the four papers: its program, with its options, and what became of it.

``python benchmarks/papers.py --list`` prints this table.
"""

import dc_rows
from row import AS_PRINTED, NEEDS_DATA, Row, smaller, words as _

QIU, TANIGUCHI = "Qiu et al. (2020)", "Taniguchi et al. (2023)"
BREULEUX = "Breuleux et al. (2011)"
_SEEDS = "--seeds " + " ".join(map(str, range(20)))
_TEN = "--seeds " + " ".join(map(str, range(10)))
_TINY = "--data digits --latent 16 --batch-size 100 --epochs 1 --points 2 --temperatures 30"
_ABLATION = "--only lmi lmi_biased lmi_binary lmi_whole lmi_gaussian"
_IMAGES = "--data digits --epochs 5 --chains 10 --sides 20 20 --steps 40 --samples 100 --sweeps 10"


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
                "--seconds 100 --seeds 0 1"
            ),
            _("--only pcd_ucd --steps 6000 --every 50 --seconds 300"),
        ),
        (_(f"--only ucd ucd1 truncated persistent pcd_ucd cd1 cd5 cd20 pcd --steps 50000 {_SEEDS}"),),
        smaller("20 seeds where the paper has 100, of them two of UCD by this command; rate 0.1"),
        minutes=29,
        estimated=True,
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
                "--rate 0.01 --name printed --steps 30000 --every 500 --only cd1 cd2 cd5 cd10 cd20 pcd "
                "--seeds 0 1 --seconds 100"
            ),
            _(
                "--rate 0.01 --name printed --steps 30000 --every 100 --only truncated --seeds 0 1 "
                "--seconds 80"
            ),
            _(
                "--rate 0.32 --name printed_sum --steps 2500 --every 50 --chains 320 --seeds 0 1 2 "
                "--only cd1 cd2 cd5 cd10 cd20 pcd"
            ),
        ),
        (
            _(
                "--rate 0.01 --name printed --steps 50000 --every 500 --chains 1000 "
                f"--only cd1 cd2 cd5 cd10 cd20 pcd truncated {_SEEDS}"
            ),
        ),
        smaller(
            "30,000 steps of the mean over rows, 2,500 of their sum, two or three seeds; CD of 32 and 320 "
            "chains; UCD stopped after 4,200 steps"
        ),
        minutes=8.5,
    ),
    Row(
        "u5a",
        QIU,
        (),
        "the same with Algorithm 2's projection and averaging: PCD, UCD, ParticleUCD",
        "benchmarks/projection",
        (_("--steps 40 --points 2 --seeds 0 --only pcd particles"),),
        ((),),
        (_(f"--steps 50000 {_SEEDS}"),),
        smaller(
            "three seeds, at most 10,000 steps; the paper has Algorithm 2 without an experiment of its own"
        ),
        minutes=8,
    ),
    Row(
        "u6",
        QIU,
        ("figure 3", "figure 7", "figure 8", "figure 9", "table 2"),
        "a simulated 200x20 model fitted with 100 units: CD-1 to CD-10, PCD, UCD, PCD first; meeting times, "
        "discarded draws, costs",
        "benchmarks/simulated_rbm",
        (_("--steps 10 --points 2 --temperatures 30 --only cd1 pcd_ucd --visible 20 --latent 8 --truth 5"),),
        (
            _(
                "--steps 800 --points 4 --temperatures 500 --seconds 40 --seeds 0 1 "
                "--only cd1 cd2 cd5 cd10 pcd ucd_few published pcd_ucd"
            ),
        ),
        (_(f"--steps 10000 {_TEN}"),),
        smaller(
            "3,000 steps of CD-1 and PCD, 1,200 of UCD, one seed; 800 of all, three seeds (two of UCD as "
            "published)"
        ),
        minutes=10,
        estimated=True,
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
        minutes=1,
        estimated=True,
    ),
    Row(
        "u8t",
        QIU,
        ("figure 12",),
        "variance of the gradient of b, c and W along training, and its cost",
        "benchmarks/gradient_variance",
        (_("training --steps 10 --points 2 --repeats 3 --truth 5 --only cd1 published"),),
        (_("training --steps 400 --points 5 --repeats 6 --seconds 60 --seeds 0 1"),),
        (_(f"training --steps 10000 --points 100 --repeats 20 {_TEN}"),),
        smaller("400 steps where the paper has 10,000; six repeats at five steps, two seeds"),
        minutes=10,
    ),
    Row(
        "u9",
        QIU,
        ("figure 4", "figure 10", "figure 11", "table 3"),
        "784x1000 on MNIST: CD-1 to CD-30, PCD, UCD, PCD first; meeting times, discarded draws, costs",
        "benchmarks/mnist_rbm",
        (_(f"ucd {_TINY} --only cd1 cd20 pcd published ucd pcd_ucd"),),
        (
            _(
                "ucd --latent 100 --rows 12000 --name small --epochs 20 --points 8 --temperatures 300 "
                "--seconds 90 --only cd1 cd10 cd20 cd30 pcd published ucd"
            ),
        ),
        (_("ucd --epochs 40 --points 50 --temperatures 10000"),),
        smaller(
            "MNIST, four epochs where the paper has some forty, one seed; as 784x100 for 20 epochs, two "
            "seeds (one by this command), without PCD first, which did not end"
        ),
        minutes=4,
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
        minutes=3,
        estimated=True,
    ),
    Row(
        "l8",
        TANIGUCHI,
        ("table 1",),
        "MNIST by deep and Gaussian-Bernoulli machines, by a Frechet distance that is not the FID",
        "benchmarks/image_quality",
        (_(_IMAGES),),
        (_("--name large --sides 500 500 --steps 8000 --only lmi centered"),),
        (_("--name paper --sides 6272 6272 --steps 100000 --samples 10000 --sweeps 1000"),),
        smaller(
            "784-500-500 of two levels and 8,000 steps, all methods once and these twice, where the paper "
            "has 6272-6272-6272 and 100,000"
        ),
        minutes=13,
    ),
    Row(
        "l8a",
        TANIGUCHI,
        ("table 2",),
        "UCD-LMI without each of its parts, the correction among them, by that distance",
        "benchmarks/image_quality",
        (_(f"--name parts {_IMAGES} {_ABLATION}"),),
        (_(f"--name parts --steps 4000 {_ABLATION}"),),
        (_(f"--name parts --sides 6272 6272 --steps 100000 --samples 10000 --sweeps 1000 {_ABLATION}"),),
        smaller(
            "784-200-200 of two levels and 4,000 steps, one seed; four of the five at 784-500-500 and 8,000 "
            "steps, too"
        ),
        minutes=8.6,
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
        minutes=8,
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
            _("--data mnist --grey --sides 500 500 --steps 20000 --rate 0.01 --checkpoint-dir runs/l6_500"),
            _("--data mnist --grey --sides 6272 6272 --steps 100000 --rate 0.01 --checkpoint-dir runs/l6"),
            _(
                "--data mnist --grey --sides 6272 6272 --steps 100000 --estimator pcd "
                "--checkpoint-dir runs/l6_pcd"
            ),
        ),
        smaller("784-500-500 of two levels and 8,000 steps on MNIST, 19 minutes"),
        minutes=5,
        estimated=True,
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
    *dc_rows.ROWS,
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
        minutes=12,
        estimated=True,
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
        "r3m",
        BREULEUX,
        ("figure 3 left", "figure 3 right"),
        "models by CD, SML, FPCD, herding: Gibbs, rates-FPCD of decay 1 and 0.95, k chosen; grey means",
        "benchmarks/mixing_models",
        (
            _(
                "models --hidden 16 --steps 50 --samples 60 --tune 20 --seeds 0 --try-k 1 2 "
                "--try-rates 0.01 --rows 100"
            ),
        ),
        (_("models"), _("models --data mnist --hidden 500 --samples 1000 --tune 300 --seeds 0 1")),
        (_("models --data mnist --hidden 500 --steps 10000 --samples 200000"),),
        smaller(
            "MNIST, 2,000 samples of two chains (1,000 by this command), and 8x8 digits, 5,000 of three, for "
            "words and for USPS"
        ),
        minutes=14,
    ),
    Row(
        "r5",
        BREULEUX,
        (),
        "the lower bound that rises while rates-FPCD samples, exact on a 9x4 machine",
        "benchmarks/mixing_models",
        (_("bound --steps 50 --samples 100 --seeds 0"),),
        (_("bound --samples 20000 --seeds 0 1 2 3 4"),),
        (_("bound --samples 100000 --seeds 0 1 2 3 4 5 6 7 8 9"),),
        smaller("a machine small enough to sum, where the paper argues without a figure"),
        minutes=0.7,
    ),
    Row(
        "best",
        "the four papers and beyond",
        (),
        "every trainer on MNIST: held-out likelihood by smc, seconds",
        "benchmarks/trainers",
        (_("--data digits --latent 12 --steps 40 --particles 50 --sweeps 1 --seeds 0"),),
        (_("--steps 3000 --seeds 0 1"),),
        (_("--latent 500 --steps 75000 --particles 1000 --sweeps 20"),),
        smaller("784x100, 3,000 steps (dear methods fewer), three seeds, two by this command"),
        minutes=9,
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
        minutes=2,
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
        minutes=10,
        estimated=True,
    ),
)
ROWS = {row.name: row for row in _ROWS}
