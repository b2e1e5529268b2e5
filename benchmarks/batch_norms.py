"""What batch norms should use at test: statistics of training, of a task's labelled images, of all of its images.

    python benchmarks/batch_norms.py RUN_DIR ... [--episodes 600] [--out docs/results/batch-norms.md]

Runs of Gaussian processes, whose network normalised every task by itself in training. Way and shot are the run's, test
episodes those of `evaluate.py`; temperatures are fitted by NLL on as many episodes of validation classes, row by row.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from fewshot.evaluation import metrics, scoring
from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.class_interval import classes_of_episodes
from fewshot.evaluation.episodes import EVALUATION_SEED, Episodes, Shape, draw_episodes
from fewshot.evaluation.paired import Difference, paired_difference
from fewshot.evaluation.resampling import Interval
from fewshot.evaluation.text import format_markdown
from fewshot.learners import GaussianProcess, Learner, Prediction, Traits
from fewshot.runners.cli import compilation_cache
from fewshot.tasks import Dataset
from fewshot.training.data import load_splits
from fewshot.training.run import load_run

Drawn = tuple[Dataset, Episodes]

QUERIES = 15
RULES = ("training", "labelled images", "all images")
HEADER = ["run", "shot", "statistics of", "accuracy, %", "more, points", "more over classes"]
HEADER += ["NLL", "less, nats", "less over classes"]
LEGEND = """
*NLL* is at a temperature fitted on validation classes. *More*, *less*: than with the statistics of training, on the
same tasks, with 95% intervals over tasks and over classes."""


class Normalised(Learner):
    """A process whose network normalises a task by its labelled images, or by these and its queries."""

    traits = Traits(transductive=True)

    def __init__(self, process: GaussianProcess, by_queries: bool):
        self.process, self.by_queries = process, by_queries

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.process.image_shape

    def fit(self, key, support, y, classes, mask=None):
        """The process is fitted when the queries are there."""
        return (key, support, y, classes), jnp.asarray(0)

    def predict(self, key, state, query) -> Prediction:
        fit_key, support, y, classes = state
        number, network = len(support), nnx.merge(*nnx.split(self.process.deep_kernel), copy=True)
        network.set_attributes(normalised_by=None if self.by_queries else number)
        features: Array = network(jnp.concatenate([support, query])[None], train=True)[0]
        posterior, code = self.process.fit(fit_key, features[:number], y, classes)
        found = self.process.predict(key, posterior, features[number:])
        return found._replace(code=jnp.maximum(found.code, code))


def by_rule(process: GaussianProcess) -> dict[str, Learner]:
    """The learner of each of RULES."""
    return dict(zip(RULES, (process, Normalised(process, False), Normalised(process, True)), strict=True))


def scored(learner: Learner, validation: Drawn, test: Drawn) -> scoring.Scores:
    """The test at the temperature of validation classes."""
    held_out, found = (
        scoring.score(learner, scoring.embed(learner, data), drawn) for data, drawn in (validation, test)
    )
    return found.tempered(fit_temperature(held_out.probabilities, held_out.labels))


def rows(path: str, count: int, data_root: str | None) -> list[list[str]]:
    """A line for each rule."""
    run = load_run(path)
    if not isinstance(run.learner, GaussianProcess):
        raise SystemExit(f"expected runs of Gaussian processes, got {run.config.learner} in {path}")
    splits, shape = load_splits(run.config.dataset, data_root), Shape(run.config.way, run.config.shot, QUERIES)
    validation, test = (
        (data, draw_episodes(EVALUATION_SEED, split, data, shape, count))
        for split, data in (("validation", splits.validation), ("test", splits.test))
    )
    shown = test[1].indices
    classes = classes_of_episodes(splits.test.index, splits.test.counts, shown.x_support, shown.y_support)
    scores = [scored(learner, validation, test) for learner in by_rule(run.learner).values()]
    accuracy, nll = (
        [metrics.EPISODE_SCORES[name](one.probabilities, one.labels) for one in scores] for name in ("accuracy", "nll")
    )
    lines = []
    for rule, right, lost in zip(RULES, accuracy, nll, strict=True):
        cells = [f"{Path(path).parent.name}/{Path(path).name}", str(run.config.shot), rule, f"{100 * right.mean():.2f}"]
        more = paired_difference(right[None], accuracy[0][None], classes)
        less = paired_difference(nll[0][None], lost[None], classes)
        of_rule = [*gained(more, 100, 2), f"{lost.mean():.3f}", *gained(less, 1, 3)]
        lines.append(cells + (of_rule if rule != RULES[0] else ["", "", f"{lost.mean():.3f}", "", ""]))
    return lines


def gained(found: Difference, unit: float, digits: int) -> tuple[str, str]:
    """The difference with its interval over tasks, and the one over classes."""

    def words(one: Interval) -> str:
        return f"{unit * one.low:+.{digits}f} to {unit * one.high:+.{digits}f}"

    return f"{unit * found.mean:+.{digits}f} ({words(found.over_episodes)})", words(found.over_classes)


def main() -> None:
    arguments = parse()
    compilation_cache.keep_programs()
    lines = [line for path in arguments.runs for line in rows(path, arguments.episodes, arguments.data_root)]
    command = f"python benchmarks/batch_norms.py {' '.join(arguments.runs)} --episodes {arguments.episodes}"
    page = f"# What batch norms use at test\n\n`{command}`\n\n{format_markdown(HEADER, lines)}{LEGEND}\n"
    print(page)
    if arguments.out:
        Path(arguments.out).write_text(page)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--episodes", type=int, default=600, metavar="N", help="of each split (default 600)")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    parser.add_argument("--out", metavar="FILE", help="also write the page to a Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
