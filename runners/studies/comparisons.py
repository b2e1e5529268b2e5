"""What reproduce.py can run: methods under equal conditions, and which published numbers stand beside theirs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fewshot import models
from fewshot.runners.studies import naming, published
from fewshot.runners.studies.published import Published
from fewshot.training.configuration import AUTO
from fewshot.training.overrides import Setting, Settings


@dataclass(frozen=True)
class Method:
    """One row: its name, which is also its folder's, and what of a run's configuration is special to it."""

    name: str
    likelihood: str = "softmax"
    inference: str = AUTO
    changes: Mapping[str, str | int] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Methods under equal conditions: data set, ways, optimiser steps by shots, those of --quick, and test episodes.

    settings are those of every method, batches the number that test episodes are divided into, as papers do.
    quick_methods: those of --quick, all if empty.
    """

    dataset: str
    methods: tuple[Method, ...]
    way: int = 5
    episodes: Mapping[int, int] = field(default_factory=lambda: {1: 3000})
    quick_episodes: int = 300
    quick_methods: tuple[str, ...] = ()
    test_episodes: int = 600
    batches: int = 5
    settings: Settings = field(default_factory=dict)
    published: tuple[Published, ...] = ()

    @property
    def setting(self) -> str:
        """The data set and the ways as titles of figures say them."""
        return f"{naming.DATASETS.get(self.dataset, self.dataset)}, {self.way}-way"


# Of cvi, where a method names no other: what kept tables were made with. `meta_train.py` takes fewer on characters.
INNER_STEPS = 10
# Where the objective is not what is compared: rows name it, as the default may change.
BOUND: Mapping[str, str | int] = {"objective": "elbo"}


def learned_each_way(name: str, likelihood: str, inference: str, **settings: Setting) -> Iterable[Method]:
    """A pair by marginal likelihood (ML), prediction of the queries (PL), and of every label from the others (LOO)."""
    draws = inference == "gibbs"
    bound = "evidence" if draws or likelihood == "gaussian" else "elbo"
    ways = {"ml": bound, "pl": "predictive", **({} if draws else {"loo": "leave-one-out"})}
    for suffix, objective in ways.items():
        yield Method(f"{name}-{suffix}", likelihood, inference, {"objective": objective}, settings)


# With its usual kernel, and noise and scale nearly as they start. Learned by the evidence the noise falls with the
# errors on training classes, which a new domain then pays for.
_DKT = Method(
    "dkt", "gaussian", "exact", {"kernel": "cosine", "objective": "evidence"}, {"trainer.kernel_learning_rate": 1e-4}
)
_ONE_STEP: Settings = {"learner.inner_steps": 1, "learner.inner_rate": 0.1}  # of MAML, as published for characters
_FOUR_TASKS: dict[str, str | int] = {"tasks_per_step": 4}  # of MAML's family, as published
_ON_FIXED_FEATURES = tuple(
    Method(name, changes={"learner": name, "backbone": "identity"})
    for name in ("nearest-mean", "nearest-neighbour", "logistic-regression")
)


def _changed(method: Method, settings: Settings) -> Method:
    """The same with training images that are changed at random."""
    return replace(method, name=f"{method.name}-augmented", settings={**method.settings, **settings})


def _characters_to_letters() -> tuple[Method, ...]:
    """Every Gaussian-process method of the papers, ours, the other learners, and many with changed training images."""
    augmented: dict[str, Setting] = {"trainer.augment": "handwriting"}
    gibbs: dict[str, Setting] = {"inference.chains": 4}
    return (
        *learned_each_way("softmax-cvi", "softmax", "cvi"),
        *learned_each_way("softmax-laplace", "softmax", "laplace"),
        *learned_each_way("one-vs-each-cvi", "one-vs-each", "cvi"),
        *learned_each_way("one-vs-each-cavi", "one-vs-each", "cavi"),
        *learned_each_way("one-vs-each-gibbs", "one-vs-each", "gibbs"),
        *learned_each_way("logistic-softmax-cvi", "logistic-softmax", "cvi"),
        *learned_each_way("logistic-softmax-cavi", "logistic-softmax", "cavi"),
        *learned_each_way("logistic-softmax-gibbs", "logistic-softmax", "gibbs", **gibbs),
        *learned_each_way("label-regression", "gaussian", "exact"),
        _DKT,
        _changed(_DKT, augmented),
        *learned_each_way("softmax-cvi-augmented", "softmax", "cvi", **augmented),
        Method(
            "softmax-cvi-augmented-loo-4-tasks",
            "softmax",
            "cvi",
            _FOUR_TASKS | {"objective": "leave-one-out"},
            augmented,
        ),
        *learned_each_way("one-vs-each-cvi-augmented", "one-vs-each", "cvi", **augmented),
        *learned_each_way("one-vs-each-gibbs-augmented", "one-vs-each", "gibbs", **augmented),
        *_learners(_ONE_STEP),
        *(_changed(method, augmented) for method in _learners(_ONE_STEP)),
        *_ON_FIXED_FEATURES,
    )


def _learners(maml: Settings) -> Iterable[Method]:
    """The learners that train and are no Gaussian process, under their own names; maml: settings of its family."""
    for name in ("prototypical", "matching", "relation", "feature-transfer", "baseline++"):
        yield Method(name, changes={"learner": name})
    for name in ("maml", "first-order-maml", "inductive-maml", "bayesian-maml", "chaser", "abml"):
        yield Method(name, changes={**_FOUR_TASKS, "learner": name}, settings=maml)


def _characters() -> tuple[Method, ...]:
    """The main Gaussian processes, and the other learners."""
    return (
        *learned_each_way("softmax-cvi", "softmax", "cvi"),
        *learned_each_way("one-vs-each-gibbs", "one-vs-each", "gibbs"),
        _DKT,
        *_learners(_ONE_STEP),
        *_ON_FIXED_FEATURES,
    )


def _photographs() -> tuple[Method, ...]:
    """One method of every likelihood, the first with changed training images too, and every other learner."""
    return (
        *learned_each_way("softmax-cvi", "softmax", "cvi"),
        *learned_each_way("one-vs-each-cvi", "one-vs-each", "cvi"),
        *learned_each_way("one-vs-each-gibbs", "one-vs-each", "gibbs"),
        *learned_each_way("logistic-softmax-cvi", "logistic-softmax", "cvi"),
        *learned_each_way("label-regression", "gaussian", "exact"),
        _DKT,
        *learned_each_way("softmax-cvi-augmented", "softmax", "cvi", **{"trainer.augment": "photographs"}),
        *_learners({}),
        *_ON_FIXED_FEATURES,
    )


# Likelihoods with their inferences, by the bound; Gibbs, which has none, of one-vs-each by both objectives that it has.
_PAIRS = (
    Method("softmax-cvi", "softmax", "cvi", BOUND),
    Method("softmax-cvi-block", "softmax", "cvi", BOUND, {"inference.sites": "block"}),
    Method("softmax-laplace", "softmax", "laplace", BOUND),
    Method("logistic-softmax-cavi", "logistic-softmax", "cavi", BOUND),
    Method("logistic-softmax-cvi", "logistic-softmax", "cvi", BOUND),
    Method("logistic-softmax-gibbs", "logistic-softmax", "gibbs", {"objective": "predictive"}, {"inference.chains": 4}),
    Method("one-vs-each-cavi", "one-vs-each", "cavi", BOUND),
    Method("one-vs-each-cvi", "one-vs-each", "cvi", BOUND),
    Method("one-vs-each-laplace", "one-vs-each", "laplace", BOUND),
    Method("one-vs-each-gibbs-predictive", "one-vs-each", "gibbs", {"objective": "predictive"}),
    Method("one-vs-each-gibbs-evidence", "one-vs-each", "gibbs", {"objective": "evidence"}),
    Method("gaussian-exact", "gaussian", "exact", BOUND),
)

_PLAIN: dict[str, Setting] = {"trainer.augment": "none"}
_EARLY = {"trainer.patience": 1 / 3}  # ends a run whose validation has not improved for a third of it
_MAIN = ("softmax-cvi-loo", "one-vs-each-cvi-loo", "label-regression-ml", "softmax-cvi-augmented-loo")
_PAPERS_EPISODES = {1: 60_000, 5: 40_000}

COMPARISONS: dict[str, Comparison] = {
    "omniglot-kernels": Comparison(
        "omniglot",
        tuple(Method(name, "softmax", "cvi", {**BOUND, "kernel": name}) for name in models.KERNELS),
    ),
    "omniglot-pairs": Comparison(
        "omniglot",
        _PAIRS,
    ),
    "omniglot": Comparison("omniglot", _characters(), episodes={1: 3000, 5: 3000}, settings=_PLAIN | _EARLY),
    "omniglot-emnist": Comparison(
        "omniglot-emnist",
        _characters_to_letters(),
        episodes=_PAPERS_EPISODES,
        quick_methods=_MAIN,
        test_episodes=3000,
        settings=_PLAIN | _EARLY,
        published=published.of("omniglot-emnist"),
    ),
    # Small enough to compare all of them on a processor.
    "flowers102-32": Comparison(
        "flowers102-32",
        (
            *_PAIRS,
            Method("softmax-cvi-loo", "softmax", "cvi", {"objective": "leave-one-out"}),
            _DKT,
            *_learners({}),
            *_ON_FIXED_FEATURES,
        ),
        episodes={1: 1000, 5: 1000},
        settings=_PLAIN | _EARLY,
    ),
    **{
        name: Comparison(
            name,
            _photographs(),
            episodes=_PAPERS_EPISODES,
            quick_methods=_MAIN,
            test_episodes=3000,
            settings=_PLAIN | _EARLY,
            published=published.of(name) if name in published.DATASETS else (),
        )
        for name in ("flowers102", "tinyimagenet", "tinyimagenet-84", "cub", "mini-imagenet", "mini-imagenet-cub")
    },
}
