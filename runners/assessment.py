"""Everything that evaluate.py computes about one run, before it is printed or drawn."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from evaluation import metrics
from evaluation.calibration import LATENT_GRID, PapersTemperatures, fit_temperature, papers_temperatures
from evaluation.out_of_episode import Detection, DetectionScores, detect
from evaluation.resampling import Interval
from runners import automatic, episode_lists, scoring, shape_temperature
from runners.build import Model, load_run, splits_of
from runners.data import (
    EVALUATION_SEED,
    SPLITS,
    Episodes,
    Shape,
    draw_episodes,
    load_splits,
    queries,
)
from runners.evaluation_config import TEST_EPISODES, EvaluationConfig, check_batches
from runners.overrides import ConfigError
from runners.scoring import Scores
from tasks import DataError, Dataset, Splits, check_task_size
from tasks.corruptions import corrupt_dataset, parse_corruption

TEMPERED, RAW = "at its temperature", "raw (temperature 1)"
ADAPTED = "adapted to each task"
CALIBRATED, PAPERS = "calibrated on validation classes", "papers' two temperatures (comparison only)"
SEVERITIES = range(1, 6)
BATCHES = 5  # of episodes, for the standard deviation that papers print


class Row(NamedTuple):
    """One way to turn latents into probabilities: the predictions, all metrics with intervals, its temperatures."""

    scores: Scores
    summary: dict[str, Any]
    temperatures: dict[str, float]


class OutOfEpisode(NamedTuple):
    """Scores of own [E, Q] and other queries [E, O], how well each tells them apart, failures by result code.

    classes: from how many the other queries of an episode come.
    """

    inside: DetectionScores
    outside: DetectionScores
    detection: dict[str, Detection]
    failures: dict[str, int]
    classes: int

    def plain_areas(self) -> dict[str, dict[str, Any]]:
        """By score its AUROC and the interval, for a JSON file."""
        return {
            name: {"auroc": one.auroc, "auroc_interval": plain_interval(one.interval)}
            for name, one in self.detection.items()
        }


class Assessment(NamedTuple):
    """The results, and what they are of: `test` as scored (corrupted if asked), `severities` to accuracies."""

    config: EvaluationConfig
    model: Model
    splits: Splits
    test: Dataset
    episodes: Episodes
    rows: dict[str, Row]
    severities: dict[int, dict[str, Any]]
    out_of_episode: OutOfEpisode | None


def assess(config: EvaluationConfig) -> Assessment:
    """Load the run and the data, and score. Raises ConfigError, DataError or RunError."""
    model = load_run(config.run_dir)
    name, own = config.dataset or model.config.dataset, model.config.dataset
    splits = splits_of(model, config.data_root) if name == own else load_splits(name, config.data_root)
    _check_image_shape(model, config, splits)
    episodes = _episodes(model, config, splits.test)
    way, shot = episodes.shape.way, episodes.shape.shot
    if config.adapt and shot == 1:
        raise ConfigError("--adapt leaves labelled images out, so it needs two of every class, got 1-shot tasks")
    if config.out_of_episode and way >= splits.test.classes:
        raise ConfigError(
            f"--out-of-episode needs test classes that an episode does not show, got {way}-way tasks of all "
            f"{splits.test.classes}; choose a smaller --way"
        )
    validation = None
    if config.calibrate or config.papers_calibration:
        validation = _validation(model, splits, way, shot, config)
    model = replace(model, temperature=shape_temperature.for_shape(model, way, shot, config.data_root))
    test = _corrupted(config, splits.test)
    features = scoring.embed(model.deep_kernel, test)
    return Assessment(
        config,
        model,
        splits,
        test,
        episodes,
        _rows(model, features, episodes, validation, config),
        _severities(model, splits.test, episodes, config),
        detect_others(model, features, test, episodes.shape, len(episodes.keys), config.seed)
        if config.out_of_episode
        else None,
    )


def _episodes(model: Model, config: EvaluationConfig, test: Dataset) -> Episodes:
    if config.from_episodes is None:
        way, shot = config.way or model.config.way, config.shot or model.config.shot
        shape = Shape(way, shot, config.query or queries(test, shot, automatic.TEST_QUERIES))
        return draw_episodes(config.seed, "test", test, shape, config.episodes or TEST_EPISODES)
    episodes = episode_lists.episodes_of(episode_lists.read(Path(config.from_episodes)), config.seed, test)
    check_batches(config, len(episodes.keys))
    return episodes


def _corrupted(config: EvaluationConfig, clean: Dataset, severity: int | None = None) -> Dataset:
    """Every image corrupted once, keyed by its number: each is embedded once, and support and query see the same."""
    if config.corruption is None:
        return clean
    if clean.images.dtype != np.uint8:
        raise DataError(f"expected images as bytes for --corruption, got {clean.images.dtype}; features have none")
    name, given = parse_corruption(config.corruption)
    return corrupt_dataset(corruption_key(config.seed), clean, name, severity or given)


def corruption_key(seed: int) -> PRNGKeyArray:
    """The key that test images are corrupted by: none of those that episodes are drawn by."""
    return jax.random.fold_in(jax.random.key(seed), len(SPLITS))


def _rows(
    model: Model, features: Array, episodes: Episodes, validation: Dataset | None, config: EvaluationConfig
) -> dict[str, Row]:
    """The predictions at every temperature asked for: raw and at the run's own always."""
    raw = scoring.score(model, features, episodes)
    found = {
        TEMPERED: (raw.tempered(model.temperature), {"temperature": model.temperature}),
        RAW: (raw, {"temperature": 1.0}),
    }
    if config.adapt:
        fewer = shape_temperature.for_shape(model, episodes.shape.way, episodes.shape.shot - 1, config.data_root)
        each = scoring.task_temperatures(model, features, episodes, fewer)
        found[ADAPTED] = (
            raw.tempered(each),
            {"temperature_of_fewer": fewer, "mean_temperature": float(np.mean(each.mean))},
        )
    if validation is not None:
        temperature, papers = _validated(model, episodes.shape, validation, config)
        if config.calibrate:
            found[CALIBRATED] = raw.tempered(temperature), {"temperature": temperature}
        if papers:
            both = scoring.score(model, features, episodes, latent_temperature=papers.latent)
            temperatures = {"latent_temperature": papers.latent, "predictive_temperature": papers.predictive}
            found[PAPERS] = both.tempered(papers.predictive), temperatures | {"validation_ece": papers.ece}
    return {name: Row(scores, summary(scores, config.batches), given) for name, (scores, given) in found.items()}


def summary(scores: Scores, batches: int) -> dict[str, Any]:
    """All metrics with their intervals; 0 batches stand for BATCHES, or as many as there are episodes."""
    found = metrics.intervals(np.random.default_rng(0), scores.probabilities, scores.labels)
    plain = {name: plain_interval(interval) for name, interval in found.items()}
    return {**scores.summary(batches or min(BATCHES, len(scores.labels))), "intervals": plain}


def plain_interval(interval: Interval) -> list[float] | None:
    """Bounds for a JSON file, which has no nan: None where there is but one episode."""
    return list(interval) if np.isfinite(interval).all() else None


def _validation(model: Model, splits: Splits, way: int, shot: int, config: EvaluationConfig) -> Dataset:
    """Validation classes of the run's own data set, whatever the test is on.

    Raises DataError where they have no tasks of that shape.
    """
    own = model.config.dataset
    validation = (splits if splits.name == own else splits_of(model, config.data_root)).validation
    try:
        check_task_size(validation, way, shot, queries(validation, shot, automatic.TEST_QUERIES))
    except DataError as error:
        raise DataError(f"no tasks of validation classes to calibrate on: {error}") from error
    return validation


def _validated(
    model: Model, shape: Shape, validation: Dataset, config: EvaluationConfig
) -> tuple[float, PapersTemperatures | None]:
    """Temperatures fitted on uncorrupted validation classes."""
    size = Shape(shape.way, shape.shot, queries(validation, shape.shot, automatic.TEST_QUERIES))
    count = model.config.trainer.validation_episodes
    episodes = draw_episodes(EVALUATION_SEED, "validation", validation, size, count)
    features = scoring.embed(model.deep_kernel, validation)
    raw = scoring.score(model, features, episodes)
    temperature = fit_temperature(raw.probabilities, raw.labels)
    if not config.papers_calibration:
        return temperature, None
    at = {t: scoring.score(model, features, episodes, latent_temperature=t).probabilities for t in LATENT_GRID}
    return temperature, papers_temperatures(at, raw.labels)


def _severities(
    model: Model, clean: Dataset, episodes: Episodes, config: EvaluationConfig
) -> dict[int, dict[str, Any]]:
    """Accuracy on the same episodes at every severity, 0 for clean images, where a report will show it."""
    if config.corruption is None or config.report is None:
        return {}
    images = {0: clean} | {severity: _corrupted(config, clean, severity) for severity in SEVERITIES}
    found = {}
    for severity, dataset in images.items():
        scores = scoring.score(model, scoring.embed(model.deep_kernel, dataset), episodes).tempered(model.temperature)
        found[severity] = scores.accuracies() | {"brier": metrics.brier(scores.probabilities, scores.labels)}
    return found


def detect_others(model: Model, features: Array, test: Dataset, shape: Shape, count: int, seed: int) -> OutOfEpisode:
    """`count` test episodes with as many queries of each of as many other classes (METHODS 6), or of all there are."""
    others = min(shape.way, test.classes - shape.way)
    drawn = draw_episodes(seed, "test", test, shape, count, other_classes=others)
    inside, outside, codes = scoring.score_open(model, features, drawn)
    found = detect(np.random.default_rng(0), inside, outside)
    return OutOfEpisode(inside, outside, found, scoring.failures(codes), others)


def _check_image_shape(model: Model, config: EvaluationConfig, splits: Splits) -> None:
    expected = model.deep_kernel.backbone.image_shape
    if splits.image_shape != expected:
        raise DataError(
            f"expected images of shape {expected}, as {config.run_dir} was trained on, got {splits.image_shape} "
            f"from {splits.name}; choose a data set of that shape or train a run on this one"
        )
