"""What the papers claim of their methods, and one question of our own, as comparisons of reproduce.py: COMPARISONS.

Each changes one thing on Omniglot, 5-way, and leaves the rest at one recipe. docs/questions.md has the answers. Where
nothing else is said the kernel is the default one: with cosines logistic-softmax by CAVI hardly learns in 300 steps.
"""

from collections.abc import Iterable, Mapping

from fewshot.runners.studies.comparisons import BOUND, Comparison, Method, learned_each_way
from fewshot.runners.studies.hyperparameters import CDKT, KERNELS, TEMPERATURES
from fewshot.runners.studies.published import Published
from fewshot.training.overrides import Settings

EPISODES = 600
CAVI_STEPS = (1, 2, 3, 5, 7)
CHAIN_STEPS = (1, 5, 20)
# Only s2 / tau^2 counts, and s2 starts at 30: with these s2 / tau^2 starts at 3.3 and 1, with CDKT's at 13 and more.
ABOVE_TEMPERATURES = (3.0, 5.5)
# Fewer episodes than a long run's: these are short, and their tests are the comparison's own.
_SCORED: Settings = {"trainer.validation_episodes": 200, "trainer.temperature_episodes": 300}


def _cavi(name: str, settings: Settings | None = None, **changes: str | int) -> Method:
    """Logistic-softmax as CDKT trains it: two steps of CAVI, differentiated through, tau starting at 1."""
    usual: dict[str, str | int] = {"hypergradient": "unroll", "inner_steps": 2, "objective": "elbo"}
    return Method(name, "logistic-softmax", "cavi", usual | changes, settings or {})


def _of_objectives() -> Iterable[Method]:
    """What the outer loop maximises, with the gradient at fixed sites."""
    for objective in ("elbo", "predictive", "cavity-evidence", "leave-one-out"):
        yield Method(objective, "softmax", "cvi", {"objective": objective})


def _of_crossing() -> Iterable[Method]:
    """Where the gradient is stopped. At (m, V) only the KL sees the kernel: that is `evidence` with `sites` (H8).

    For CAVI that is the gradient at the sites, to rounding, so it has no rows of its own.
    """
    for steps in (2, 20):
        yield _cavi(f"cavi-sites-{steps}", hypergradient="sites", inner_steps=steps)
        yield _cavi(f"cavi-unroll-{steps}", inner_steps=steps)
    for steps in (1, 3):
        for name, objective, mode in (
            ("detached", "evidence", "sites"),
            ("sites", "elbo", "sites"),
            ("unroll", "elbo", "unroll"),
        ):
            changes: dict[str, str | int] = {"objective": objective, "hypergradient": mode, "inner_steps": steps}
            yield Method(f"cvi-{name}-{steps}", "softmax", "cvi", changes)


def _of_outer_gradient() -> Iterable[Method]:
    """Three steps of mirror descent against plain gradient on a free Gaussian, both differentiated through."""
    unrolled: dict[str, str | int] = {"hypergradient": "unroll", "objective": "elbo"}
    for rho in (0.5, 1.0):
        yield Method(f"mirror-{rho:g}", "softmax", "cvi", unrolled | {"inner_steps": 3}, {"inference.rho": rho})
    for rate, steps in ((0.1, 2), (0.02, 2), (0.02, 20)):
        changes = unrolled | {"inner_steps": steps}
        yield Method(f"gradient-{rate:g}-{steps}", "softmax", "gradient", changes, {"inference.learning_rate": rate})


def _of_mean_field() -> Iterable[Method]:
    """The same likelihood with factors in q, with a Gaussian q, and with draws of the posterior."""
    for likelihood in ("logistic-softmax", "one-vs-each"):
        for inference in ("cavi", "cvi", "gibbs"):
            settings: Settings = {"inference.chains": 4} if inference == "gibbs" else {}
            yield Method(f"{likelihood}-{inference}", likelihood, inference, {"objective": "predictive"}, settings)


def _of_likelihoods() -> Iterable[Method]:
    """Marginal likelihood against prediction of the queries, and of every label from all others."""
    yield from learned_each_way("softmax-cvi", "softmax", "cvi")
    yield from learned_each_way("one-vs-each-cvi", "one-vs-each", "cvi")
    yield from learned_each_way("logistic-softmax-cavi", "logistic-softmax", "cavi")
    yield from learned_each_way("label-regression", "gaussian", "exact")


def _comparison(
    methods: Iterable[Method], shots: Mapping[int, int] | None = None, published: Iterable[Published] = ()
) -> Comparison:
    episodes = shots or {1: EPISODES}
    return Comparison("omniglot", tuple(methods), episodes=episodes, settings=_SCORED, published=tuple(published))


COMPARISONS: dict[str, Comparison] = {
    "question-objectives": _comparison(_of_objectives()),
    "question-crossing": _comparison(_of_crossing()),
    "question-temperature": _comparison(
        [
            _cavi(f"tau-{tau:g}", {"likelihood.temperature": tau, "likelihood.learn_temperature": False})
            for tau in (*TEMPERATURES, *ABOVE_TEMPERATURES)
        ],
        published=[Published(f"tau-{tau:g}", {1: accuracy}, CDKT) for tau, accuracy in TEMPERATURES.items()],
    ),
    "question-mean": _comparison([_cavi("learned-mean"), _cavi("no-mean", {"kernel.mean": None})]),
    "question-steps": _comparison([_cavi(f"steps-{steps}", inner_steps=steps) for steps in CAVI_STEPS]),
    "question-kernel": _comparison([_cavi(f"kernel-{kernel}", kernel=kernel) for kernel in KERNELS]),
    "question-outer-gradient": _comparison(_of_outer_gradient()),
    "question-ml-pl": _comparison(_of_likelihoods()),
    "question-chains": _comparison(
        [
            Method(f"sweeps-{steps}", "one-vs-each", "gibbs", {"objective": "predictive", "inner_steps": steps})
            for steps in CHAIN_STEPS
        ]
    ),
    "question-mean-field": _comparison(_of_mean_field()),
    "question-calibration": _comparison(
        [
            Method("softmax-cvi", "softmax", "cvi", BOUND),
            Method("one-vs-each-cvi", "one-vs-each", "cvi", BOUND),
            Method("one-vs-each-gibbs", "one-vs-each", "gibbs", {"objective": "predictive", "inner_steps": 1}),
        ],
        {5: EPISODES},
    ),
}
