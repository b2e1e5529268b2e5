"""What reproduce.py can run: methods under equal conditions, and which published numbers stand beside theirs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fewshot import models
from fewshot.runners.studies import published
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


def learned_both_ways(name: str, likelihood: str, inference: str, **settings: Setting) -> Iterable[Method]:
    """A pair trained by its marginal likelihood (ML, all images labelled) and by prediction of the queries (PL)."""
    bound = {"gaussian": "evidence"}.get(likelihood, "evidence" if inference == "gibbs" else "elbo")
    for suffix, objective in (("ml", bound), ("pl", "predictive")):
        yield Method(f"{name}-{suffix}", likelihood, inference, {"objective": objective}, settings)


def _characters_to_letters() -> tuple[Method, ...]:
    """Every Gaussian-process method of the papers, ours, the other learners, and many with changed training images."""
    augmented: dict[str, Setting] = {"trainer.augment": "handwriting"}
    gibbs: dict[str, Setting] = {"inference.chains": 4}
    # With its usual kernel, and noise and scale nearly as they start. Learned by the evidence the noise falls with the
    # errors on training classes, which a new domain then pays for.
    dkt = {"kernel": "cosine", "objective": "evidence"}, {"trainer.kernel_learning_rate": 1e-4}
    return (
        *learned_both_ways("softmax-cvi", "softmax", "cvi"),
        *learned_both_ways("softmax-laplace", "softmax", "laplace"),
        *learned_both_ways("one-vs-each-cvi", "one-vs-each", "cvi"),
        *learned_both_ways("one-vs-each-cavi", "one-vs-each", "cavi"),
        *learned_both_ways("one-vs-each-gibbs", "one-vs-each", "gibbs"),
        *learned_both_ways("logistic-softmax-cvi", "logistic-softmax", "cvi"),
        *learned_both_ways("logistic-softmax-cavi", "logistic-softmax", "cavi"),
        *learned_both_ways("logistic-softmax-gibbs", "logistic-softmax", "gibbs", **gibbs),
        *learned_both_ways("label-regression", "gaussian", "exact"),
        Method("dkt", "gaussian", "exact", *dkt),
        Method("dkt-augmented", "gaussian", "exact", dkt[0], {**dkt[1], **augmented}),
        *learned_both_ways("softmax-cvi-augmented", "softmax", "cvi", **augmented),
        *learned_both_ways("one-vs-each-cvi-augmented", "one-vs-each", "cvi", **augmented),
        *learned_both_ways("one-vs-each-gibbs-augmented", "one-vs-each", "gibbs", **augmented),
        *_learners(),
        *_learners("-augmented", augmented),
        *(Method(name, changes={"learner": name, "backbone": "identity"}) for name in _ON_FIXED_FEATURES),
    )


_ONE_STEP: Settings = {"learner.inner_steps": 1, "learner.inner_rate": 0.1}  # of MAML, as published for characters


def _learners(suffix: str = "", settings: Settings | None = None, maml: Settings = _ONE_STEP) -> Iterable[Method]:
    """The learners that train and are no Gaussian process, under their own names; maml: settings of its family."""
    settings = settings or {}
    for name in ("prototypical", "matching", "relation", "feature-transfer", "baseline++"):
        yield Method(f"{name}{suffix}", changes={"learner": name}, settings=settings)
    for name in ("maml", "first-order-maml", "bayesian-maml", "chaser", "abml"):
        yield Method(f"{name}{suffix}", changes={"learner": name, "tasks_per_step": 4}, settings={**maml, **settings})


def _photographs() -> tuple[Method, ...]:
    """One method of every likelihood, and the first with changed training images."""
    return (
        *learned_both_ways("softmax-cvi", "softmax", "cvi"),
        *learned_both_ways("one-vs-each-cvi", "one-vs-each", "cvi"),
        *learned_both_ways("one-vs-each-gibbs", "one-vs-each", "gibbs"),
        *learned_both_ways("logistic-softmax-cvi", "logistic-softmax", "cvi"),
        *learned_both_ways("label-regression", "gaussian", "exact"),
        *learned_both_ways("softmax-cvi-augmented", "softmax", "cvi", **{"trainer.augment": "photographs"}),
    )


# Likelihoods with their inferences; Gibbs of one-vs-each with both of its objectives.
_PAIRS = (
    Method("softmax-cvi", "softmax", "cvi"),
    Method("softmax-cvi-block", "softmax", "cvi", settings={"inference.sites": "block"}),
    Method("softmax-laplace", "softmax", "laplace"),
    Method("logistic-softmax-cavi", "logistic-softmax", "cavi"),
    Method("logistic-softmax-cvi", "logistic-softmax", "cvi"),
    Method("logistic-softmax-gibbs", "logistic-softmax", "gibbs", settings={"inference.chains": 4}),
    Method("one-vs-each-cavi", "one-vs-each", "cavi"),
    Method("one-vs-each-cvi", "one-vs-each", "cvi"),
    Method("one-vs-each-laplace", "one-vs-each", "laplace"),
    Method("one-vs-each-gibbs-predictive", "one-vs-each", "gibbs", {"objective": "predictive"}),
    Method("one-vs-each-gibbs-evidence", "one-vs-each", "gibbs", {"objective": "evidence"}),
    Method("gaussian-exact", "gaussian", "exact"),
)

_ON_FIXED_FEATURES = ("nearest-mean", "nearest-neighbour", "logistic-regression")
_PLAIN: dict[str, Setting] = {"trainer.augment": "none"}
_EARLY = {"trainer.patience": 1 / 3}  # ends a run whose validation has not improved for a third of it
_MAIN = ("softmax-cvi-ml", "one-vs-each-cvi-ml", "label-regression-ml", "softmax-cvi-augmented-ml")
_PAPERS_EPISODES = {1: 60_000, 5: 40_000}

COMPARISONS: dict[str, Comparison] = {
    "omniglot-kernels": Comparison(
        "omniglot",
        tuple(Method(name, "softmax", "cvi", {"kernel": name}) for name in models.KERNELS),
    ),
    "omniglot-pairs": Comparison(
        "omniglot",
        _PAIRS,
    ),
    "omniglot-emnist": Comparison(
        "omniglot-emnist",
        _characters_to_letters(),
        episodes=_PAPERS_EPISODES,
        quick_methods=_MAIN,
        test_episodes=3000,
        settings=_PLAIN | _EARLY,
        published=published.of("omniglot-emnist"),
    ),
    # Small enough to compare all pairs on a processor.
    "flowers102-32": Comparison("flowers102-32", _PAIRS, episodes={1: 1000}, settings=_PLAIN),
    **{
        name: Comparison(
            name,
            (*_photographs(), *_learners(maml={})) if name == "mini-imagenet-cub" else _photographs(),
            episodes=_PAPERS_EPISODES,
            quick_methods=_MAIN,
            test_episodes=3000,
            settings=_PLAIN,
            published=published.of(name) if name in published.DATASETS else (),
        )
        for name in ("flowers102", "tinyimagenet", "tinyimagenet-84", "cub", "mini-imagenet", "mini-imagenet-cub")
    },
}
