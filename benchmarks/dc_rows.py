# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The rows of ``paper_rows.py`` that are of Upadhya and Sastry (2017)."""

from row import NEEDS_DATA, Row, State, smaller, words as _

UPADHYA = "Upadhya, Sastry (2017)"
_TEN = "--seeds " + " ".join(map(str, range(10)))
_TINY = "--data digits --latent 16 --batch-size 100 --epochs 1 --points 2 --temperatures 30"
_ROWS_2500 = "--latent 50 --rows 3000 --name small --temperatures 500"
_SMALL = f"{_ROWS_2500} --batch-size 50"
_PAID = "784x50, 2,500 rows of MNIST in batches of 50"


def _mnist(
    name: str,
    printed: tuple[str, ...],
    what: str,
    experiment: str,
    small: str,
    epochs: int,
    state: State,
    minutes: float | None = None,
    estimated: bool = False,
) -> Row:
    """A row of ``mnist_rbm.py``: of Upadhya and Sastry, 784x500."""
    full = f"{experiment} --epochs {epochs} --points 50 --temperatures 10000 {_TEN}"
    quick, own = (_(f"{experiment} {_TINY}"),), (_(f"{experiment} {small}"),)
    script = "benchmarks/mnist_rbm"
    return Row(name, UPADHYA, printed, what, script, quick, own, (_(full),), state, minutes, estimated)


ROWS = (
    Row(
        "d4",
        UPADHYA,
        ("figure 1", "figure 2"),
        "bars and stripes 3x3, shifting bar: CD, PCD, centered, S-DCP, CS-DCP; a control; Algorithms 3 and 4 "
        "as printed",
        "benchmarks/dc_programming",
        (_("--trials 2 --epochs 500"),),
        (_("--trials 10 --epochs 10000 --points 100 --panels bas bar3"),),
        (_("--trials 25 --epochs 50000"),),
        smaller(
            "10 trials of 10,000 epochs (30,000 without Algorithms 3 and 4), where the paper has 25 of 50,000"
        ),
        minutes=12.3,
    ),
    _mnist(
        "d5",
        ("figure 3",),
        "784x50 on 2,500 images of MNIST: ten trials of 20 epochs, with the control",
        "dc",
        f"{_SMALL} --epochs 20 --points 5 {_TEN}",
        200,
        smaller(f"{_PAID}, 20 epochs where the paper has 200, ten trials"),
        minutes=11,
    ),
    _mnist(
        "d5w",
        ("figure 3",),
        "the same for the printed 200 epochs",
        "dc",
        "--latent 50 --rows 3000 --name long --temperatures 1000 --batch-size 50 --epochs 200 --points 10",
        200,
        smaller("784x50 and 2,500 images of MNIST, one trial; as many epochs as printed"),
        minutes=8.6,
    ),
    _mnist(
        "d5l",
        ("figure 3",),
        "784x500 on MNIST, one run; held-out likelihood along the way",
        "dc",
        "--epochs 1 --points 4",
        200,
        smaller("one epoch where the paper has 200, one trial, without the control"),
        minutes=12,
        estimated=True,
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
        f"{_ROWS_2500} --batch-size 250 --epochs 20 --points 5 --seeds 0 1 2",
        250,
        smaller(
            "784x50, 2,500 rows of MNIST in batches of 250, 20 epochs where the paper has 250, three trials; "
            "784x500 for two epochs at one rate"
        ),
        minutes=4,
    ),
    _mnist(
        "d7w",
        ("figure 5",),
        "the same for the printed 250 epochs",
        "spectral",
        "--latent 50 --rows 3000 --name long --temperatures 1000 --batch-size 250 --epochs 250 --points 10",
        250,
        smaller("784x50 and 2,500 images of MNIST in batches of 250, one trial; as many epochs as printed"),
        minutes=14.5,
    ),
    _mnist(
        "d8a",
        ("figure 6a",),
        "S-DCP and CS-DCP by learning rate",
        "rates",
        f"{_SMALL} --epochs 10 --points 4 --seeds 0 1",
        200,
        smaller(f"{_PAID}, 10 epochs where the paper has 200, two trials"),
        minutes=3.3,
    ),
    _mnist(
        "d8b",
        ("figure 6b",),
        "S-DCP and CS-DCP by d and K', d K' = 24",
        "inner",
        f"{_SMALL} --temperatures 300 --epochs 6 --points 2 --seeds 0 1",
        200,
        smaller(f"{_PAID}, 6 epochs where the paper has 200, two trials"),
        minutes=9.5,
    ),
    _mnist(
        "d9a",
        ("figure 7a",),
        "S-DCP by batch size",
        "batches",
        f"{_SMALL} --epochs 6 --points 3 --seeds 0 1",
        200,
        smaller("784x50, 2,500 rows of MNIST, 6 epochs where the paper has 200, two trials"),
        minutes=3.8,
    ),
    _mnist(
        "d9b",
        ("figure 7b", "table 1"),
        "S-DCP and CS-DCP by the first params",
        "starts",
        f"{_SMALL} --epochs 6 --points 3 --seeds 0 1",
        200,
        smaller(f"{_PAID}, 6 epochs where the paper has 200, two trials"),
        minutes=1.1,
    ),
)
