# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Every figure and table of the four papers: its program, its options, and its outcome.

``python benchmarks/papers/papers.py --list`` prints this table.
"""

from row import AS_PRINTED, NEEDS_DATA, Row, State, smaller

QIU, TANIGUCHI = "Qiu et al. (2020)", "Taniguchi et al. (2023)"
BREULEUX, UPADHYA = "Breuleux et al. (2011)", "Upadhya, Sastry (2017)"
_BARS, _MNIST = "benchmarks/papers/bars_and_stripes", "benchmarks/papers/mnist_rbm"
_QUALITY, _MIXING = "benchmarks/papers/image_quality", "benchmarks/papers/mixing"
_SEEDS = "--seeds " + " ".join(map(str, range(20)))
_TEN = "--seeds " + " ".join(map(str, range(10)))
_TINY = "--data digits --latent 16 --batch-size 100 --epochs 1 --points 2 --temperatures 30"
_ABLATION = "--only lmi lmi_biased lmi_binary lmi_whole lmi_gaussian"
_IMAGES = "--data digits --epochs 5 --chains 10 --sides 20 20 --steps 40 --samples 100 --sweeps 10"
_EXACT = "--name exact --falling --rate 0.2 --every 100 --only particles window weighted pcd cd1"
_TUNE = "--steps 200 --samples 200 --tune 50 --only gibbs fpcd"

_QIU_ROWS = (
    Row(
        "u5",
        QIU,
        ("figure 2",),
        "bars and stripes 4x4 at rate 0.1: UCD, CD, PCD, and PCD followed by UCD",
        _BARS,
        ("--steps 1000 --every 250 --only cd1 pcd",),
        (
            f"--only cd1 cd5 pcd --every 100 --variance-every 1000 --steps 12000 {_SEEDS}",
            "--only ucd_few truncated ucd1 persistent --every 50 --variance-every 500 --steps 3000 --seconds "
            "100 "
            "--seeds 0 1",
            "--only pcd_ucd --steps 6000 --every 50 --seconds 300",
        ),
        (f"--only ucd ucd1 truncated persistent pcd_ucd cd1 cd5 cd20 pcd --steps 50000 {_SEEDS}",),
        smaller("20 seeds where the paper has 100, of them two of UCD by this command; rate 0.1"),
        minutes=29,
        estimated=True,
    ),
    Row(
        "u5p",
        QIU,
        ("figure 2", "figure 6", "table 1"),
        "the same at the printed rate 0.01, of the mean and of the sum over the 32 rows: CD-1 to CD-20, "
        "discarded "
        "draws, costs",
        _BARS,
        ("--rate 0.01 --name printed --steps 200 --every 50 --only cd1 cd2 truncated --chains 100",),
        (
            "--rate 0.01 --name printed --steps 30000 --every 500 --only cd1 cd2 cd5 cd10 cd20 pcd --seeds 0 "
            "1 "
            "--seconds 100",
            "--rate 0.01 --name printed --steps 30000 --every 100 --only truncated --seeds 0 1 --seconds 80",
            "--rate 0.32 --name printed_sum --steps 2500 --every 50 --chains 320 --seeds 0 1 2 "
            "--only cd1 cd2 cd5 cd10 cd20 pcd",
        ),
        (
            "--rate 0.01 --name printed --steps 50000 --every 500 --chains 1000 "
            f"--only cd1 cd2 cd5 cd10 cd20 pcd truncated {_SEEDS}",
        ),
        smaller(
            "30,000 steps of the mean over rows, 2,500 of their sum, two or three seeds; CD with 32 and 320 "
            "chains; "
            "UCD stopped after 4,200 steps"
        ),
        minutes=8.5,
    ),
    Row(
        "u5a",
        QIU,
        (),
        "the same with Algorithm 2's projection and averaging: PCD, UCD, ParticleUCD",
        _BARS,
        ("--name projected --bound 5 --average --steps 40 --every 20 --only pcd particles",),
        (
            "--name projected --bound 5 --average --steps 10000 --every 200 --seeds 0 1 2 --only pcd "
            "particles",
            "--name averaged --average --steps 10000 --every 200 --seeds 0 1 2 --only pcd particles",
            "--name projected --bound 5 --average --steps 3000 --every 60 --seeds 0 1 2 --only ucd1_few",
            "--name averaged --average --steps 3000 --every 60 --seeds 0 1 2 --only ucd1_few",
        ),
        (f"--name projected --bound 5 --average --steps 50000 --only pcd ucd1_few particles {_SEEDS}",),
        smaller(
            "three seeds, at most 10,000 steps; the paper has Algorithm 2 without an experiment of its own"
        ),
        minutes=8,
    ),
    Row(
        "u5x",
        "ours, after Qiu et al. (2020)",
        (),
        "exact gradients: ParticleUCD and WeightedPCD beside PCD and CD, a falling rate",
        _BARS,
        ("--name exact --falling --rate 0.2 --steps 40 --every 20 --only particles weighted",),
        (f"{_EXACT} --steps 12000 --seeds 0 1",),
        (f"{_EXACT} ucd_few --steps 20000 --seconds 420 {_SEEDS}",),
        smaller("20 seeds of 12,000 steps, 20,000 of the cheap methods; two seeds by this command"),
        minutes=12,
        estimated=True,
    ),
    Row(
        "u6",
        QIU,
        ("figure 3", "figure 7", "figure 8", "figure 9", "table 2"),
        "a simulated 200x20 model fitted with 100 units: CD-1 to CD-10, PCD, UCD, PCD followed by UCD; "
        "meeting times, "
        "discarded draws, costs",
        "benchmarks/papers/simulated_rbm",
        ("--steps 10 --points 2 --temperatures 30 --only cd1 pcd_ucd --visible 20 --latent 8 --truth 5",),
        (
            "--steps 800 --points 4 --temperatures 500 --seconds 40 --seeds 0 1 "
            "--only cd1 cd2 cd5 cd10 pcd ucd_few published pcd_ucd",
        ),
        (f"--steps 10000 {_TEN}",),
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
        "benchmarks/papers/meeting_times",
        ("untrained --pairs 50",),
        ("untrained",),
        ("untrained",),
        AS_PRINTED,
        minutes=1,
        estimated=True,
    ),
    Row(
        "u8t",
        QIU,
        ("figure 12",),
        "variance of the gradient of b, c and W along training, and its cost",
        "benchmarks/papers/gradient_variance",
        ("training --steps 10 --points 2 --repeats 3 --truth 5 --only cd1 published",),
        ("training --steps 400 --points 5 --repeats 6 --seconds 60 --seeds 0 1",),
        (f"training --steps 10000 --points 100 --repeats 20 {_TEN}",),
        smaller("400 steps where the paper has 10,000; six repeats at five steps, two seeds"),
        minutes=10,
    ),
    Row(
        "u9",
        QIU,
        ("figure 4", "figure 10", "figure 11", "table 3"),
        "784x1000 on MNIST: CD-1 to CD-30, PCD, UCD, PCD followed by UCD; meeting times, discarded draws, "
        "costs",
        _MNIST,
        (f"ucd {_TINY} --only cd1 cd20 pcd published ucd pcd_ucd",),
        (
            "ucd --latent 100 --rows 12000 --name small --epochs 20 --points 8 --temperatures 300 --seconds "
            "90 "
            "--only cd1 cd10 cd20 cd30 pcd published ucd",
        ),
        ("ucd --epochs 40 --points 50 --temperatures 10000",),
        smaller(
            "MNIST, four epochs where the paper has some forty, one seed; as 784x100 for 20 epochs, two "
            "seeds (one by "
            "this command), without PCD followed by UCD, which did not end"
        ),
        minutes=4,
    ),
    Row(
        "u9f",
        QIU,
        ("figure 4", "figure 10", "figure 11", "table 3"),
        "the same on Fashion-MNIST",
        _MNIST,
        (f"ucd {_TINY} --only cd1 published",),
        ("ucd --data fashion_mnist --name fashion --epochs 2 --points 4 --seconds 300",),
        ("ucd --data fashion_mnist --name fashion --epochs 40 --points 50 --temperatures 10000",),
        NEEDS_DATA,
    ),
)

_TANIGUCHI_ROWS = (
    Row(
        "l7",
        TANIGUCHI,
        ("figure 1",),
        "search and meeting times on orthogonal weights, from uniform draws and from local modes",
        "benchmarks/papers/meeting_times",
        ("orthogonal --sizes 2 10",),
        ("orthogonal",),
        ("orthogonal --sizes 1 2 5 10 15 20 25 50 75 100 150 200",),
        AS_PRINTED,
        minutes=3,
        estimated=True,
    ),
    Row(
        "l8",
        TANIGUCHI,
        ("table 1",),
        "MNIST by deep and Gaussian-Bernoulli machines, by a Frechet distance that is not the FID",
        _QUALITY,
        (_IMAGES,),
        ("--name large --sides 500 500 --steps 8000 --only lmi centered",),
        ("--name paper --sides 6272 6272 --steps 100000 --samples 10000 --sweeps 1000",),
        smaller(
            "784-500-500 of two levels and 8,000 steps, all methods once and these twice, where the paper "
            "has "
            "6272-6272-6272 and 100,000"
        ),
        minutes=13,
    ),
    Row(
        "l8a",
        TANIGUCHI,
        ("table 2",),
        "UCD-LMI without each of its parts, the correction among them, by that distance",
        _QUALITY,
        (f"--name parts {_IMAGES} {_ABLATION}",),
        (f"--name parts --steps 4000 {_ABLATION}",),
        (f"--name parts --sides 6272 6272 --steps 100000 --samples 10000 --sweeps 1000 {_ABLATION}",),
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
        "benchmarks/papers/local_modes",
        ("--steps 40 --seeds 0 --only lmi biased pcd",),
        ("--steps 2000 --rate 0.005",),
        ("--steps 100000",),
        smaller("64-12-12 on 8x8 digits, 2,000 steps, so that the likelihood is exact"),
        minutes=8,
    ),
    Row(
        "l6",
        TANIGUCHI,
        ("figure 2", "figure 3"),
        "samples and completed halves of a deep machine by UCD-LMI; by --estimator pcd the baseline",
        "models/dbm",
        ("--data digits --sides 12 8 --steps 4 --batch-size 10 --num-pairs 4 --no-progress",),
        ("--data mnist --sides 500 500 --steps 2000 --no-progress",),
        (
            "--data mnist --grey --sides 500 500 --steps 20000 --rate 0.01 --checkpoint-dir runs/l6_500",
            "--data mnist --grey --sides 6272 6272 --steps 100000 --rate 0.01 --checkpoint-dir runs/l6",
            "--data mnist --grey --sides 6272 6272 --steps 100000 --estimator pcd --checkpoint-dir "
            "runs/l6_pcd",
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
        _QUALITY,
        (f"{_IMAGES} --only lmi",),
        ("--data cifar10 --rows 12000 --only lmi centered --steps 2000",),
        ("--data cifar10 --only lmi centered --sides 10000 10000 --steps 100000",),
        NEEDS_DATA,
    ),
)


def _upadhya(
    name: str,
    printed: str,
    what: str,
    experiment: str,
    small: str,
    state: State,
    minutes: float | None = None,
    epochs: int = 200,
) -> Row:
    """Return a row of ``mnist_rbm.py``: 784x500, 200 epochs in the paper."""
    paper = f"{experiment} --epochs {epochs} --points 50 --temperatures 10000 {_TEN}"
    short, small_options = (f"{experiment} {_TINY}",), (f"{experiment} {small}",)
    return Row(
        name,
        UPADHYA,
        tuple(printed.split(", ")),
        what,
        _MNIST,
        short,
        small_options,
        (paper,),
        state,
        minutes,
    )


_ROWS_2500 = "--latent 50 --rows 3000 --name small --temperatures 500"
_SMALL = f"{_ROWS_2500} --batch-size 50"
_LONG = "--latent 50 --rows 3000 --name long --temperatures 1000"
_SIZE = "784x50, 2,500 rows of MNIST in batches of 50"
_UPADHYA_ROWS = (
    Row(
        "d4",
        UPADHYA,
        ("figure 1", "figure 2"),
        "bars and stripes 3x3, shifting bar: CD, PCD, centered, S-DCP, CS-DCP; a control; Algorithms 3 and 4 "
        "as "
        "printed",
        "benchmarks/papers/dc_programming",
        ("--trials 2 --epochs 500",),
        ("--trials 10 --epochs 10000 --points 100 --panels bas bar3",),
        ("--trials 25 --epochs 50000",),
        smaller(
            "10 trials of 10,000 epochs (30,000 without Algorithms 3 and 4), where the paper has 25 of 50,000"
        ),
        minutes=12.3,
    ),
    _upadhya(
        "d5",
        "figure 3",
        "784x50 on 2,500 images of MNIST: ten trials of 20 epochs, with the control",
        "dc",
        f"{_SMALL} --epochs 20 --points 5 {_TEN}",
        smaller(f"{_SIZE}, 20 epochs where the paper has 200, ten trials"),
        minutes=11,
    ),
    _upadhya(
        "d5w",
        "figure 3",
        "the same for the printed 200 epochs",
        "dc",
        f"{_LONG} --batch-size 50 --epochs 200 --points 10",
        smaller("784x50 and 2,500 images of MNIST, one trial; as many epochs as printed"),
        minutes=8.6,
    ),
    _upadhya(
        "d5l",
        "figure 3",
        "784x500 on MNIST, one run; held-out likelihood along the way",
        "dc",
        "--epochs 1 --points 4",
        smaller("one epoch where the paper has 200, one trial, without the control"),
        minutes=12,
    ),
    _upadhya(
        "d6",
        "figure 4",
        "the same on OMNIGLOT",
        "dc",
        "--data omniglot --name omniglot --epochs 5 --points 5",
        NEEDS_DATA,
    ),
    _upadhya(
        "d7",
        "figure 5",
        "batches of 1000: spectral descent at five rates, CD, S-DCP, CS-DCP",
        "spectral",
        f"{_ROWS_2500} --batch-size 250 --epochs 20 --points 5 --seeds 0 1 2",
        smaller(
            "784x50, 2,500 rows of MNIST in batches of 250, 20 epochs where the paper has 250, three trials; "
            "784x500 "
            "for two epochs at one rate"
        ),
        minutes=4,
        epochs=250,
    ),
    _upadhya(
        "d7w",
        "figure 5",
        "the same for the printed 250 epochs",
        "spectral",
        f"{_LONG} --batch-size 250 --epochs 250 --points 10",
        smaller("784x50 and 2,500 images of MNIST in batches of 250, one trial; as many epochs as printed"),
        minutes=14.5,
        epochs=250,
    ),
    _upadhya(
        "d8a",
        "figure 6a",
        "S-DCP and CS-DCP by learning rate",
        "rates",
        f"{_SMALL} --epochs 10 --points 4 --seeds 0 1",
        smaller(f"{_SIZE}, 10 epochs where the paper has 200, two trials"),
        minutes=3.3,
    ),
    _upadhya(
        "d8b",
        "figure 6b",
        "S-DCP and CS-DCP by d and K', d K' = 24",
        "inner",
        f"{_SMALL} --temperatures 300 --epochs 6 --points 2 --seeds 0 1",
        smaller(f"{_SIZE}, 6 epochs where the paper has 200, two trials"),
        minutes=9.5,
    ),
    _upadhya(
        "d9a",
        "figure 7a",
        "S-DCP by batch size",
        "batches",
        f"{_SMALL} --epochs 6 --points 3 --seeds 0 1",
        smaller("784x50, 2,500 rows of MNIST, 6 epochs where the paper has 200, two trials"),
        minutes=3.8,
    ),
    _upadhya(
        "d9b",
        "figure 7b, table 1",
        "S-DCP and CS-DCP by the first params",
        "starts",
        f"{_SMALL} --epochs 6 --points 3 --seeds 0 1",
        smaller(f"{_SIZE}, 6 epochs where the paper has 200, two trials"),
        minutes=1.1,
    ),
)

_BREULEUX_ROWS = (
    Row(
        "r4",
        BREULEUX,
        ("figure 1", "figure 2"),
        "indirect sampling likelihood by the number of samples: Gibbs, rates-FPCD and its relatives, "
        "tempering",
        _MIXING,
        (_TUNE,),
        ("", "--data mnist --hidden 500 --steps 10000 --samples 20000"),
        ("--data mnist --hidden 500 --steps 10000 --samples 200000",),
        smaller("20,000 samples (200,000 of Gibbs), MNIST and 8x8 digits, one model of PCD, one seed"),
        minutes=12,
        estimated=True,
    ),
    Row(
        "r2",
        BREULEUX,
        ("figure 2", "figure 3 left"),
        "the same on USPS",
        _MIXING,
        (_TUNE,),
        ("--data usps --hidden 200 --samples 10000",),
        ("--data usps --hidden 500 --steps 10000 --samples 200000",),
        NEEDS_DATA,
    ),
    Row(
        "r3",
        BREULEUX,
        ("figure 3 right",),
        "the same on a bag of words",
        _MIXING,
        (_TUNE,),
        ("--data bag_of_words --hidden 200 --samples 10000 --only gibbs fpcd",),
        ("--data bag_of_words --hidden 500 --steps 10000 --samples 200000 --only gibbs fpcd",),
        NEEDS_DATA,
    ),
    Row(
        "r3m",
        BREULEUX,
        ("figure 3 left", "figure 3 right"),
        "models by CD, SML, FPCD, herding: Gibbs, rates-FPCD of decay 1 and 0.95, k chosen",
        "benchmarks/papers/mixing_models",
        (
            "models --hidden 16 --steps 50 --samples 60 --tune 20 --seeds 0 --try-k 1 2 --try-rates 0.01 "
            "--most-rows 100",
        ),
        ("models", "models --data mnist --hidden 500 --samples 1000 --tune 300 --seeds 0 1"),
        ("models --data mnist --hidden 500 --steps 10000 --samples 200000",),
        smaller(
            "MNIST, 2,000 samples of two chains (1,000 by this command), and 8x8 digits, 5,000 of three, for "
            "words and "
            "for USPS"
        ),
        minutes=14,
    ),
    Row(
        "r5",
        BREULEUX,
        (),
        "the lower bound that rises while rates-FPCD samples, exact on a 9x4 machine",
        "benchmarks/papers/mixing_models",
        ("bound --steps 50 --samples 100 --seeds 0",),
        ("bound --samples 20000 --seeds 0 1 2 3 4",),
        ("bound --samples 100000 --seeds 0 1 2 3 4 5 6 7 8 9",),
        smaller("a machine small enough to sum, where the paper argues without a figure"),
        minutes=0.7,
    ),
)

_OTHER_ROWS = (
    Row(
        "best",
        "the four papers and beyond",
        (),
        "every trainer on MNIST: held-out likelihood by smc, seconds",
        "benchmarks/papers/trainers",
        ("--data digits --latent 12 --steps 40 --particles 50 --sweeps 1 --seeds 0",),
        ("--steps 3000 --seeds 0 1",),
        ("--latent 500 --steps 75000 --particles 1000 --sweeps 20",),
        smaller("784x100, 3,000 steps (expensive methods fewer), three seeds, two by this command"),
        minutes=9,
    ),
    Row(
        "u8",
        "ours, after Qiu et al. (2020)",
        (),
        "variance of a gradient by its settings, and its cost",
        "benchmarks/papers/gradient_variance",
        ("--visible 6 --latent 4 --repeats 20 --pairs 50",),
        ("",),
        ("--repeats 2000",),
        AS_PRINTED,
        minutes=2,
    ),
    Row(
        "ais",
        "Grosse et al. (2015)",
        (),
        "coverage of annealed importance sampling's bracket; a diverging model under two estimates",
        "benchmarks/papers/bracket",
        ("--repeats 2 --temperatures 30 --steps 500 --points 2",),
        ("",),
        ("--repeats 100 --temperatures 20 300 10000",),
        smaller("20 repeats, small models whose log Z is exact"),
        minutes=10,
        estimated=True,
    ),
)
ROWS = {
    row.name: row for row in (*_QIU_ROWS, *_TANIGUCHI_ROWS, *_UPADHYA_ROWS, *_BREULEUX_ROWS, *_OTHER_ROWS)
}
