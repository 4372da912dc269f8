# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Index entries for the words that readers type into the search box.

The search ranks a page first whose index entry is the query. A page's own words do not suffice: a log that
names a model ten times outranks the page that explains it.
"""

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

WORDS = {
    "docs/choosing": "choosing an estimator, which estimator",
    "docs/cite": "cite, bibtex, citation",
    "docs/faq": (
        "FAQ, questions, early stopping, weight decay, dropout, PyTorch, recommender, "
        "Windows, bug report"
    ),
    "docs/fields/anomaly_scores": (
        "anomaly detection, outlier detection, anomaly score, novelty detection"
    ),
    "docs/fields/imputation": "multiple imputation, Rubin's rules, missing at random",
    "docs/fields/inverse_ising": (
        "inverse Ising, couplings from samples, Boltzmann machine learning, inverse "
        "problem, mean field inversion"
    ),
    "docs/fields/item_response": (
        "item response, ordinal regression, ordinal answers, Rasch model, psychometrics"
    ),
    "docs/fields/max_cut": "max-cut, QUBO, quantum annealing, combinatorial optimisation",
    "docs/fields/potts_alignments": (
        "protein, multiple sequence alignment, contact prediction, direct coupling "
        "analysis, DCA"
    ),
    "docs/fields/random_graphs": (
        "ERGM, exponential random graph, social network, Fisher information, degeneracy"
    ),
    "docs/fields/spike_trains": "spike trains, neurons, maximum entropy model, neuroscience",
    "docs/gallery": "generate images, examples",
    "docs/glossary": "glossary",
    "docs/guide/devices": "GPU, TPU, several devices",
    "docs/guide/discrete_latents": (
        "variable selection, spike-and-slab, spike and slab, HMM, hidden Markov model, "
        "mixture model, changepoint, change point, belief propagation, Viterbi, WAIC, "
        "LOO, occupancy, Dawid and Skene, label switching"
    ),
    "docs/guide/judge": "partition function, effective sample size, convergence, model evaluation",
    "docs/guide/numpyro": "doubly intractable, autologistic, NumPyro, exchange algorithm",
    "docs/guide/train": "learning rate, momentum",
    "docs/howto/any_energy": "XY model, phi^4, MaxSAT, knapsack, hard constraints, constraints",
    "docs/howto/counts": "topic model, word counts, Poisson",
    "docs/howto/follow_a_run": "tensorboard, wandb, mlflow, progress bar",
    "docs/howto/missing_entries": "missing data, missing values",
    "docs/howto/scikit_learn": "grid search, scikit-learn",
    "docs/howto/spin_glass": (
        "spin glass, ground state, simulated annealing, parallel tempering, replica "
        "exchange, Hopfield, susceptibility, specific heat, disorder average, Potts, "
        "Potts model"
    ),
    "docs/howto/stop_and_resume": "checkpoint, resume",
    "docs/howto/training_loop": "hyperparameter, hyperparameters, custom training loop",
    "docs/quickstart": "install, installation, pip",
    "docs/what_is": (
        "graphical model, Markov random field, energy-based model, Boltzmann machine, "
        "restricted Boltzmann machine, RBM"
    ),
    "SECURITY": "security, vulnerability",
}


def add_words(app: Sphinx, doctree: nodes.document) -> None:
    """Add the page's words below its title, as an index directive there would."""
    words = WORDS.get(app.env.docname)
    if words is None:
        return
    section = next(doctree.findall(nodes.section))
    target = section["ids"][0]
    entries = [("single", word, target, "main", None) for word in words.split(", ")]
    section.insert(1, addnodes.index(entries=entries))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-read", add_words)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
