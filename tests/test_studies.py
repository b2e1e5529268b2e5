"""Studies: the numbers behind the tables by formula, and each study from start to figure."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import is_drawn
from scipy.special import expit, softmax
from scipy.stats import norm

from fewshot.inference.inner import Code
from fewshot.runners.studies import convergence, hyperparameters, iris, likelihoods, outer_loop, questions, reporting
from fewshot.training import run_directory
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.overrides import ConfigError
from fewshot.training.run import build_run


@pytest.mark.slow
def test_confidence_before_any_data():
    f = jax.random.split(jax.random.key(0))[0]
    found = likelihoods.confidence(jax.random.key(0), 0.0, 200)
    logits = np.asarray(jax.random.normal(f, (likelihoods.CLASSES, 200)), float)
    np.testing.assert_allclose(found["softmax"], softmax(logits, axis=0).max(0), rtol=1e-5)
    np.testing.assert_allclose(found["label regression"], softmax(2 * logits, axis=0).max(0), rtol=1e-4)


def test_the_posterior_of_a_gaussian_likelihood_is_known():
    axis, value, posterior = likelihoods.surface(likelihoods.LIKELIHOODS["label regression"], 121)
    known = norm(0.5, np.sqrt(0.5)).pdf(axis)[:, None] * norm(-0.5, np.sqrt(0.5)).pdf(axis)
    np.testing.assert_allclose(posterior, known, rtol=0.01, atol=1e-4)
    moments = likelihoods.moments(axis, posterior)
    assert moments["mode_1"] == pytest.approx(0.5) and moments["mean_2"] == pytest.approx(-0.5, abs=0.01)
    assert moments["sd_1"] == pytest.approx(np.sqrt(0.5), abs=0.01) and abs(moments["correlation"]) < 1e-3
    assert value.max() <= 1


@pytest.mark.long
def test_a_class_that_is_out_leaves_the_likelihoods_of_two():
    axis, tau = np.linspace(-3, 3, 13), 0.5
    found = likelihoods.two_classes(axis, tau)
    first, second = expit(axis[:, None] / tau), expit(axis / tau)
    np.testing.assert_allclose(found["softmax"], expit((axis[:, None] - axis) / tau), rtol=1e-5)
    np.testing.assert_allclose(found["logistic-softmax"], first / (first + second), rtol=1e-5)
    # CDKT's theorem 3.1: without temperature the larger of two negative logits wins, and positive ones share.
    cold = likelihoods.two_classes(np.array([-2.0, -1.0, 1.0, 2.0]), 0.02)["logistic-softmax"]
    np.testing.assert_allclose(cold[[0, 1, 3, 3], [1, 0, 2, 0]], [0, 1, 0.5, 1], atol=1e-6)


def test_distances_and_confidence_are_those_of_each_quadrant():
    axis = np.array([-1.0, 0.0, 1.0])
    value = np.array([[0.5, 9.0, 9.0], [9.0, 9.0, 9.0], [9.0, 9.0, 0.2]])
    found = likelihoods.beside_softmax(axis, value, value + np.diag([0.1, 0.0, 0.2]))
    known = {"mean_distance_below": 0.1, "largest_distance_below": 0.1, "ls_confidence_below": 0.6}
    known |= {"mean_distance_above": 0.2, "largest_distance_above": 0.2, "ls_confidence_above": 0.6}
    assert found == pytest.approx(known | {"softmax_confidence": 0.65})


def test_first_near_counts_steps_to_stay_near():
    far, near = 1.0, 0.001
    gaps = np.array([[near] * 4, [far, near, near, near], [near, far, near, near], [far] * 4, [far, far, far, np.nan]])
    np.testing.assert_array_equal(convergence.first_near(gaps), [1, 2, 3, np.inf, np.inf])
    row = convergence.steps_needed(gaps[:3])
    assert row["median"] == 2 and row["largest"] == 3
    assert convergence.steps_needed(gaps[3:])["median"] is None


def test_fewest_chooses_at_every_scale():
    slow, fast = np.array([[1.0, 1.0, 0.0]]), np.array([[1.0, 0.0, 0.0]])
    gaps, chosen = convergence.fewest({0.1: np.stack([slow, fast]), 0.2: np.stack([fast, slow])})
    np.testing.assert_array_equal(gaps, np.stack([fast, fast]))
    assert chosen == (0.2, 0.1)


def test_splits_of_iris_are_disjoint_and_balanced():
    y = np.repeat(np.arange(3), 10)
    drawn = iris.split(0, y, 4, 5)
    for train, test in zip(drawn.train, drawn.test, strict=True):
        assert set(train[drawn.real]) | set(test) == set(range(30))
        assert not set(train[drawn.real]) & set(test)
        assert set(train) == set(train[drawn.real])
        np.testing.assert_array_equal(np.bincount(y[train[drawn.real]]), [4, 4, 4])
    assert drawn.real.sum() == 12


@pytest.mark.slow
def test_padding_of_iris_changes_nothing():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 2)).astype(np.float32), np.repeat(np.arange(3), 4).astype(np.int32)
    keys, points = jax.random.split(jax.random.key(0), 1), np.array([[0, 4, 8]])
    short = iris.solve("label regression", keys, x, y, points, np.ones(3, bool))
    long = iris.solve("label regression", keys, x, y, np.array([[0, 4, 8, 0, 4]]), np.arange(5) < 3)
    for one, other in zip(short, long, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


def of_iris(name):
    """Made-up points of Iris' shape, a split with two examples a class, axes of 5 and the map of a method."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 2)).astype(np.float32), np.repeat(np.arange(3), 30).astype(np.int32)
    drawn, axes = iris.split(0, y, 2, 1), iris.map_axes(x, 5)
    return x, y, drawn, axes, iris.map_of(name, x, y, drawn, axes, 0)


def test_maps_of_label_regression_are_the_formulas_of_regression():
    x, y, drawn, axes, found = of_iris("label regression")
    train = drawn.train[0][drawn.real]
    point = np.array([axes[0, 1], axes[1, 3]])

    def kernel(one, other):
        return np.exp(-0.5 * ((one[:, None] - other) ** 2).sum(-1))

    cross = kernel(point[None], x[train])[0]
    solved = np.linalg.solve(
        kernel(x[train], x[train]) + np.eye(6), np.stack([cross, *(2 * np.eye(3)[y[train]].T - 1)]).T
    )
    mean, variance = cross @ solved[:, 1:], 1 - cross @ solved[:, 0]
    np.testing.assert_allclose(found.grid[0, 1, 3], softmax(2 * mean), rtol=1e-4)
    np.testing.assert_allclose(found.grid[1, 1, 3], softmax(2 * mean / (1 + variance)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", iris.MAPPED)
def test_maps_agree_with_the_learner_and_know_nothing_far_away(name):
    x, y, drawn, axes, found = of_iris(name)
    learner, train = iris.learner_of(name), drawn.train[0][drawn.real]
    state, _ = learner.fit(jax.random.key(0), jnp.asarray(x[train]), jnp.asarray(y[train]), 3)
    point = jnp.array([[axes[0, 2], axes[1, 1]]])
    direct = learner.predict(jax.random.key(1), state, point).probabilities[0]
    np.testing.assert_allclose(found.grid[1, 2, 1], direct, atol=0.05)  # 512 draws each
    np.testing.assert_allclose(found.far[0], 1 / 3, atol=1e-5)
    np.testing.assert_allclose(found.far[1], 1 / 3, atol=0.02)


def test_a_map_whose_inference_failed_is_refused(monkeypatch):
    monkeypatch.setattr(iris, "predict_both_ways", lambda *_: (np.zeros((2, 26, 3)), Code.NON_FINITE))
    with pytest.raises(reporting.StudyError, match="softmax, cvi, but its inference ended with NON_FINITE"):
        of_iris("softmax, cvi")


def test_summaries_of_maps_are_means_over_their_places():
    x, axes = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[-1.0, 0.0, 1.0]] * 2)
    flat, sure = np.full((3, 3, 3), 1 / 3), np.full((3, 3, 3), 1 / 3)
    sure[1:, 1], sure[0, 0] = [0.0, 0.9, 0.1], [0.8, 0.2, 0.0]
    far = np.full((2, 3), 1 / 3)
    maps = {
        "one-vs-each, cvi": iris.Map(np.stack([sure, sure]), far),
        "softmax, cvi": iris.Map(np.stack([flat, flat]), far),
    }
    row = iris.summaries(x, axes, maps)[0]
    assert row["in_range"] == pytest.approx((2 * 0.9 + 2 / 3) / 4) and row["around"] == pytest.approx((0.8 + 4 / 3) / 5)
    assert row["above"] == 0.5 and row["unlike_softmax"] == 0.5 and row["far"] == pytest.approx(1 / 3)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(SystemExit) as exit_info:
        reporting.command_line("iris", iris.main, "Iris", ["--quick", "--out", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "pip install scikit-learn" in capsys.readouterr().err


ROWS = {**hyperparameters.COMPARISONS, **questions.COMPARISONS}


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_papers_tables_can_be_built(name):
    comparison = ROWS[name]
    names = [method.name for method in comparison.methods]
    assert len(set(names)) == len(names)
    assert {row.method for row in comparison.published} <= set(names)
    for method in comparison.methods:
        settings = {**comparison.settings, **method.settings}
        config = RunConfig(
            likelihood=method.likelihood, inference=method.inference, settings=settings, **method.changes
        )
        build_run(resolve(config), (28, 28, 1))


def test_the_questions_hold_fixed_what_they_say():
    def built(name, method):
        (row,) = [one for one in questions.COMPARISONS[name].methods if one.name == method]
        config = RunConfig(likelihood=row.likelihood, inference=row.inference, settings=row.settings, **row.changes)
        return build_run(resolve(config), (28, 28, 1)).learner

    assert "mean" in built("question-mean", "learned-mean").hyperparameters()
    assert "mean" not in built("question-mean", "no-mean").hyperparameters()
    fixed = built("question-temperature", "tau-0.2")
    assert fixed.likelihood.temperature == 0.2 and "log_temperature" not in fixed.hyperparameters()


def finished(path, rows, figures):
    stored = json.loads((path / "results.json").read_text())
    assert stored["rows"] == json.loads(json.dumps(rows)) and rows
    assert "| --- |" in (path / "table.md").read_text()
    assert all(is_drawn(path / figure) for figure in figures)


@pytest.mark.slow
def test_the_likelihood_study(tmp_path):
    rows = likelihoods.main(quick=True, out=str(tmp_path), seed=0)
    finished(tmp_path, rows, ["confidence.png", "surfaces.png", "temperatures.png"])
    again = likelihoods.main(quick=True, out=str(tmp_path), seed=0)
    assert rows == again


@pytest.mark.slow
def test_the_iris_study(tmp_path):
    rows = iris.main(quick=True, out=str(tmp_path), seed=0)
    finished(tmp_path, rows, ["iris.png", "maps.png"])
    scored, maps = ([row for row in rows if ("elbo" in row) == wanted] for wanted in (True, False))
    assert all(row["failures"] == 0 for row in scored)
    confidence = {row["method"]: row["in_range"] for row in maps if row["prediction"] == "at the mean"}
    assert min(confidence, key=confidence.get) == "logistic-softmax, cvi"
    bounds = {row["method"]: row["elbo"] for row in scored if row["shot"] == 30}
    assert bounds["softmax, cvi"] > max(bounds["one-vs-each, cvi"], bounds["label regression"])
    assert bounds["softmax, cvi with block sites"] > max(bounds["softmax, cvi"], bounds["softmax, laplace"])


@pytest.mark.slow
def test_the_convergence_study(tmp_path):
    rows = convergence.main(quick=True, out=str(tmp_path), seed=0)
    finished(tmp_path, rows, ["convergence.png"])
    chosen = {row["method"] for row in rows if "chosen" in row}
    assert chosen == {"natural gradient, best of 3 lengths", "plain gradient, best of 3 rates"}
    steps = {(row["scale"], row["method"]): row["median"] for row in rows}
    assert all(steps[scale, convergence.MIRROR] <= 5 for scale in (1.0, 30.0))
    published = [steps[scale, convergence.PUBLISHED] for scale in (1.0, 30.0)]
    assert all(count is None or count > 100 for count in published)  # None: not within the steps looked at


@pytest.mark.slow
def test_the_outer_loop_study(tmp_path):
    rows = outer_loop.main(quick=True, out=str(tmp_path), seed=0)
    finished(tmp_path, rows, ["outer-loop.png"])
    memory = {(row["hypergradient"], row["inner_steps"]): row["step_MB"] for row in rows}
    assert memory["unroll", 10] > memory["sites", 10]
    assert jnp.isfinite(jnp.array([row["nll"] for row in rows])).all()


def test_the_outer_loop_study_goes_on_with_runs_of_its_own_seed_alone(tmp_path):
    begun, asked = (outer_loop.configuration(tmp_path, "sites", 1, 40, seed) for seed in (0, 1))
    run_directory.create(tmp_path / "sites-1", resolve(begun).to_json())
    with pytest.raises(ConfigError, match=r"sites-1 was trained with seed 0, got 1; choose another --out"):
        outer_loop.trained(asked)
