"""benchmarks/batch_norms.py: which images each rule looks at, and that the first is the run's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_benchmark

from fewshot.evaluation import scoring
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.learner_conformance import answer, task_of
from fewshot.learners.base import solve
from fewshot.training.data import load_splits
from fewshot.training.run import load_run

WAY = 3


@pytest.fixture(scope="module")
def batch_norms():
    return load_benchmark("batch_norms")


@pytest.mark.slow
def test_each_rule_looks_at_the_images_that_it_names(batch_norms, tiny_run):
    learners = batch_norms.by_rule(load_run(tiny_run.path).learner)
    task = task_of((16, 16, 1), 0)
    changed = task.x_query.at[1:].set(task_of((16, 16, 1), 1).x_query[1:])
    found, other = (
        {rule: answer(learner, *task[:2], query, WAY)[0] for rule, learner in learners.items()}
        for query in (task.x_query, changed)
    )
    moved = {rule: np.abs(found[rule] - other[rule])[0].max() for rule in learners}
    assert moved["training"] < 1e-6 and moved["labelled images"] < 1e-6 and moved["all images"] > 1e-4
    assert np.abs(found["training"] - found["labelled images"]).max() > 1e-4


@pytest.mark.slow
def test_all_images_are_normalised_as_in_training(batch_norms, tiny_run):
    process = load_run(tiny_run.path).learner
    task, key = task_of((16, 16, 1), 2), jax.random.key(0)
    found = solve(batch_norms.by_rule(process)["all images"], key, *task[:3], WAY).probabilities
    features = process.deep_kernel(jnp.concatenate([task.x_support, task.x_query])[None], train=True)[0]
    number = len(task.x_support)
    fit_key, predict_key = jax.random.split(key)
    posterior, _ = process.fit(fit_key, features[:number], task.y_support, WAY)
    expected = process.predict(predict_key, posterior, features[number:]).probabilities
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_the_first_row_is_the_run_at_the_temperature_of_validation_classes(batch_norms, tiny_run, tiny_data):
    first, *others = batch_norms.rows(str(tiny_run.path), 12, tiny_data)
    run, test = load_run(tiny_run.path), load_splits("omniglot", tiny_data).test
    episodes = draw_episodes(0, "test", test, Shape(WAY, 1, 15), 12)
    scores = scoring.score(run.learner, scoring.embed(run.learner, test), episodes)
    assert first[3] == f"{100 * scores.accuracies()['accuracy']:.2f}"
    assert [row[2] for row in others] == ["labelled images", "all images"]
    for row in others:
        assert float(row[4].split()[0]) == pytest.approx(float(row[3]) - float(first[3]), abs=0.011)
        assert float(row[7].split()[0]) == pytest.approx(float(first[6]) - float(row[6]), abs=0.0011)
