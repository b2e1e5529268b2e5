"""Everything that evaluate.py computes about one run, before it is printed or drawn.

run, found = assess(EvaluationConfig("runs/omniglot", calibrate=True))
print(found.heading, found.rows)
"""

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from jaxtyping import Array

from fewshot.evaluation import episode_lists, robustness, scoring
from fewshot.evaluation.calibration import LATENT_GRID, PapersTemperatures, fit_temperature, papers_temperatures
from fewshot.evaluation.class_interval import classes_of_episodes, intervals_over_classes
from fewshot.evaluation.episodes import EVALUATION_SEED, Episodes, Shape, draw_episodes, queries
from fewshot.evaluation.html_report import ADAPTED, CALIBRATED, PAPERS, RAW, TEMPERED, Assessment, Row
from fewshot.evaluation.metrics import Metrics
from fewshot.evaluation.out_of_episode import detect_others
from fewshot.evaluation.scoring import embed, score
from fewshot.learners import NearestMean, NearestNeighbour
from fewshot.learners.base import LatentLearner
from fewshot.models.backbones import Identity
from fewshot.tasks import DataError, Dataset, Splits, check_task_size
from fewshot.tasks.corruptions import parse_corruption
from fewshot.training import shape_temperature
from fewshot.training.configuration import HELD_OUT
from fewshot.training.data import load_splits
from fewshot.training.overrides import ConfigError
from fewshot.training.run import Run, load_run

TEST_EPISODES = 600


@dataclass(frozen=True)
class EvaluationConfig:
    """What to test, and on what: the flags of evaluate.py.

    None and 0 stand for the run's own value, query 0 for 15 or what the data allow. episodes 0: those of
    from_episodes, or TEST_EPISODES. batches 0: 5, or as many as there are episodes.
    """

    run_dir: str
    dataset: str | None = None
    episodes: int = 0
    batches: int = 0
    way: int = 0
    shot: int = 0
    query: int = 0
    seed: int = EVALUATION_SEED
    calibrate: bool = False
    papers_calibration: bool = False
    adapt: bool = False
    corruption: str | None = None
    out_of_episode: bool = False
    json: str | None = None
    report: str | None = None
    episodes_file: str | None = None
    predictions_file: str | None = None
    from_episodes: str | None = None
    data_root: str | None = None

    def command(self) -> str:
        """The command line that this is the configuration of."""
        words = ["python", "runners/evaluate.py", self.run_dir]
        for entry in fields(self)[1:]:
            value = getattr(self, entry.name)
            if value != entry.default:
                flag = f"--{entry.name.replace('_', '-')}"
                words += [flag] if value is True else [flag, str(value)]
        return shlex.join(words)


def check(config: EvaluationConfig) -> None:
    """Raises ConfigError or DataError for what cannot work whatever the run and the data are."""
    if config.from_episodes is None:
        check_batches(config, config.episodes or TEST_EPISODES)
    elif config.episodes or config.way or config.shot or config.query:
        raise ConfigError("--from-episodes decides --episodes, --way, --shot and --query; leave them out")
    if config.corruption:
        parse_corruption(config.corruption)


def check_batches(config: EvaluationConfig, episodes: int) -> None:
    """Raises ConfigError for more batches than episodes."""
    if not 0 <= config.batches <= episodes:
        raise ConfigError(f"--batches must lie between 1 and the {episodes} episodes, got {config.batches}")


def assess(config: EvaluationConfig) -> tuple[Run, Assessment]:
    """Load the run and the data, and score; the run has the temperature of the tasks' shape.

    Raises ConfigError, DataError or RunError.
    """
    run = load_run(config.run_dir)
    name, own = config.dataset or run.config.dataset, run.config.dataset
    splits = run.splits(config.data_root) if name == own else load_splits(name, config.data_root)
    _check_image_shape(run, config, splits)
    episodes = _episodes(run, config, splits.test)
    _check_possible(run, config, episodes.shape, splits.test)
    way, shot = episodes.shape.way, episodes.shape.shot
    validation = None
    if config.calibrate or config.papers_calibration:
        validation = _validation(run, splits, way, shot, config)
    run = replace(run, temperature=shape_temperature.for_shape(run, way, shot, config.data_root))
    test = robustness.corrupted(config.corruption, config.seed, splits.test)
    features = embed(run.learner, test)
    rows = _rows(run, features, episodes, validation, config)
    drawn, tempered = episodes.indices, rows[TEMPERED].scores
    shown = classes_of_episodes(test.index, test.counts, drawn.x_support, drawn.y_support)
    severities: dict[int, Metrics] = {}
    if config.corruption and config.report:  # which shows them
        severities = robustness.by_severity(
            run.learner, run.temperature, config.corruption, config.seed, splits.test, episodes
        )
    others = None
    if config.out_of_episode:
        others = detect_others(run.learner, features, test, episodes.shape, len(episodes.keys), config.seed)
    found = Assessment(
        run=Path(config.run_dir).name,
        trained_on=run.config.dataset,
        temperature=run.temperature,
        held_out=run.config.trainer.temperature_from == HELD_OUT,
        corruption=config.corruption,
        splits=splits,
        test=test,
        episodes=episodes,
        rows=rows,
        shown=shown,
        over_classes=dict(intervals_over_classes(tempered.probabilities, tempered.labels, shown)),
        severities=severities,
        out_of_episode=others,
        batch_norm=run.learner.batch_norm,
        same_features=_same_features(features, episodes),
    )
    return run, found


def _same_features(features: Array, episodes: Episodes) -> dict[str, Metrics]:
    """Accuracies of rules that learn nothing, on inputs that are vectors; nothing of those that adapt a network."""
    if features.ndim != 2:
        return {}
    as_they_are = Identity((1, 1, features.shape[1]))
    rules = {"class means": NearestMean(as_they_are), "nearest neighbour": NearestNeighbour(as_they_are)}
    return {name: score(rule, features, episodes).accuracies() for name, rule in rules.items()}


def _check_possible(run: Run, config: EvaluationConfig, shape: Shape, test: Dataset) -> None:
    """Raises ConfigError for what cannot be computed on tasks of that shape, or by that learner."""
    if config.adapt and shape.shot == 1:
        raise ConfigError("--adapt leaves labelled images out, so it needs two of every class, got 1-shot tasks")
    if config.out_of_episode and shape.way >= test.classes:
        raise ConfigError(
            f"--out-of-episode needs test classes that an episode does not show, got {shape.way}-way tasks of all "
            f"{test.classes}; choose a smaller --way"
        )
    if config.papers_calibration and not isinstance(run.learner, LatentLearner):
        raise ConfigError(
            f"--papers-calibration divides latent functions, which {run.config.learner} has not; use --calibrate"
        )
    if run.learner.ways not in (None, shape.way):
        raise ConfigError(f"{run.config.learner} tells {run.learner.ways} classes apart, got tasks of {shape.way}")


def _episodes(run: Run, config: EvaluationConfig, test: Dataset) -> Episodes:
    if config.from_episodes is None:
        way, shot = config.way or run.config.way, config.shot or run.config.shot
        shape = Shape(way, shot, config.query or queries(test, shot))
        return draw_episodes(config.seed, "test", test, shape, config.episodes or TEST_EPISODES)
    episodes = episode_lists.episodes_of(episode_lists.read(Path(config.from_episodes)), config.seed, test)
    check_batches(config, len(episodes.keys))
    return episodes


def _rows(
    run: Run, features: Array, episodes: Episodes, validation: Dataset | None, config: EvaluationConfig
) -> dict[str, Row]:
    """The predictions at every temperature asked for: raw and at the run's own always."""
    raw = score(run.learner, features, episodes)
    found = {
        TEMPERED: (raw.tempered(run.temperature), {"temperature": run.temperature}),
        RAW: (raw, {"temperature": 1.0}),
    }
    if config.adapt:
        fewer = shape_temperature.for_shape(run, episodes.shape.way, episodes.shape.shot - 1, config.data_root)
        each = scoring.task_temperatures(run.learner, features, episodes, run.temperature, fewer)
        found[ADAPTED] = (
            raw.tempered(each),
            {"temperature_of_fewer": fewer, "mean_temperature": float(np.mean(each.mean))},
        )
    if validation is not None:
        temperature, papers = _validated(run, episodes.shape, validation, config)
        if config.calibrate:
            found[CALIBRATED] = raw.tempered(temperature), {"temperature": temperature}
        if papers:
            both = score(run.learner, features, episodes, latent_temperature=papers.latent)
            temperatures = {"latent_temperature": papers.latent, "predictive_temperature": papers.predictive}
            found[PAPERS] = both.tempered(papers.predictive), temperatures | {"validation_ece": papers.ece}
    return {
        name: Row(scores, scoring.summary_with_intervals(scores, config.batches), given)
        for name, (scores, given) in found.items()
    }


def _validation(run: Run, splits: Splits, way: int, shot: int, config: EvaluationConfig) -> Dataset:
    """Validation classes of the run's own data set, whatever the test is on.

    Raises DataError where they have no tasks of that shape.
    """
    own = run.config.dataset
    validation = (splits if splits.name == own else run.splits(config.data_root)).validation
    try:
        check_task_size(validation, way, shot, queries(validation, shot))
    except DataError as error:
        raise DataError(f"no tasks of validation classes to calibrate on: {error}") from error
    return validation


def _validated(
    run: Run, shape: Shape, validation: Dataset, config: EvaluationConfig
) -> tuple[float, PapersTemperatures | None]:
    """Temperatures fitted on uncorrupted validation classes."""
    size = Shape(shape.way, shape.shot, queries(validation, shape.shot))
    count = run.config.trainer.validation_episodes
    episodes = draw_episodes(EVALUATION_SEED, "validation", validation, size, count)
    features = embed(run.learner, validation)
    raw = score(run.learner, features, episodes)
    temperature = fit_temperature(raw.probabilities, raw.labels)
    if not config.papers_calibration:
        return temperature, None
    at = {t: score(run.learner, features, episodes, latent_temperature=t).probabilities for t in LATENT_GRID}
    return temperature, papers_temperatures(at, raw.labels)


def _check_image_shape(run: Run, config: EvaluationConfig, splits: Splits) -> None:
    expected = run.learner.image_shape
    if splits.image_shape != expected:
        raise DataError(
            f"expected images of shape {expected}, as {config.run_dir} was trained on, got {splits.image_shape} "
            f"from {splits.name}; choose a data set of that shape or train a run on this one"
        )
