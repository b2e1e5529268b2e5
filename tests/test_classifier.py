"""The estimator: scikit-learn's contract, what may be handed to it, and what it says beside probabilities."""

import itertools
import pickle
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx
from PIL import Image
from problems import double
from scipy.special import entr
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

from fewshot import conditioning, heads, pretrained
from fewshot.classifier import FewShotClassifier
from fewshot.evaluation.selection import kept_at
from fewshot.heads import GaussianProcessHead, PretrainedHead, TrainedRun
from fewshot.inference.inner import exact, run
from fewshot.learners import GaussianProcess, Learner, LogisticRegression, NearestNeighbour
from fewshot.learners.base import traced
from fewshot.models import KERNELS, Identity, LabelRegression
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.gaussian import Marginals
from fewshot.models.likelihoods import Softmax
from fewshot.pretrained import Kind, Pretrained, TemperatureTable
from fewshot.training import weights
from fewshot.training.run import Run, load_run
from fewshot.training.run_directory import RunError

REGRESSION = GaussianProcessHead(likelihood="gaussian", kernel="rbf")  # compiles in the least time
LAPLACE = GaussianProcessHead(inference="laplace")
# That neither condition on anything nor compile: the others are slow.
QUICK = (
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimators_unfitted",
    "check_fit1d",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
    "check_get_params_invariance",
    "check_classifiers_regression_target",
    "check_classifiers_one_label",
    "check_complex_data",
    "check_estimators_empty_data_messages",
    "check_estimators_nan_inf",
    "check_supervised_y_no_nan",
)


def clusters(count=4, classes=3, width=6, seed=0):
    """Features [classes * count, width], labels of words."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), count)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return 3 * centres[y] + rng.normal(size=(len(y), width)), np.array(["ash", "birch", "cedar", "elm"])[y]


@pytest.mark.parametrize("name", QUICK)
def test_checks_of_scikit_learn_that_cost_nothing(name):
    getattr(estimator_checks, name)("FewShotClassifier", FewShotClassifier(REGRESSION, draws=None))


# The tests' run-time type checker refuses the -1 that this check hands to every parameter of the constructor.
TYPED = {"check_do_not_raise_errors_in_init_or_set_params": "the run-time type checker of the tests"}


@pytest.mark.slow
@parametrize_with_checks([FewShotClassifier(LAPLACE)], expected_failed_checks=lambda estimator: TYPED)
def test_all_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.long
def test_pipelines_tables_searches_and_scores():
    features, labels = clusters(6)
    table = pd.DataFrame(features, columns=[f"x{i}" for i in range(6)])
    pipeline = make_pipeline(StandardScaler(), FewShotClassifier(clone(REGRESSION), temperature=1.0))
    grid = {"fewshotclassifier__learner__scale": [1.0, 30.0]}
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(table, pd.Series(labels))
    assert search.best_score_ > 0.9 and set(search.predict(table)) == {"ash", "birch", "cedar"}
    alone = FewShotClassifier(clone(REGRESSION), temperature=1.0).fit(table, labels)
    assert list(alone.feature_names_in_) == list(table.columns) and alone.n_features_in_ == 6
    with pytest.raises(ValueError, match="feature names"):
        alone.predict(table[table.columns[::-1]])
    with pytest.raises(ValueError, match="X has 5 features"):
        clone(alone).fit(features, labels).predict(features[:, :5])
    assert cross_val_score(alone, features, labels, cv=2).mean() > 0.9
    assert alone.score(table, labels) > 0.9


def test_clones_share_programs_and_start_from_nothing():
    features, labels = clusters()
    deep_kernel = DeepKernel(Identity((1, 1, 6)), KERNELS["rbf"](), rngs=nnx.Rngs(0))
    learner = GaussianProcess(deep_kernel, LabelRegression(), partial(exact))  # a copy of which is another
    for given in (learner, REGRESSION):
        first = FewShotClassifier(given, random_state=3, draws=128, temperature=1.0).fit(features, labels)
        expected, programs = first.predict_proba(features), traced._cache_size()
        second = clone(first)
        with pytest.raises(NotFittedError):
            second.predict(features)
        for name in ("task_", "class_count_", "prior_temperature_", "temperature_", "code_", "learner_"):
            assert not hasattr(second, name)
            with pytest.raises(NotFittedError):
                getattr(second, name)
        np.testing.assert_array_equal(second.fit(features, labels).predict_proba(features), expected)
        assert traced._cache_size() == programs


def test_parameters_that_make_no_sense_are_refused_in_one_line():
    features, labels = clusters()
    cases = [
        ({"learner": GaussianProcessHead(likelihood="soft")}, "GaussianProcessHead: expected a known likelihood, got"),
        ({"learner": GaussianProcessHead().set_params(likelihood=3)}, "expected a name as likelihood, got 3"),
        ({"learner": GaussianProcessHead(scale=-1.0)}, "scale: expected a positive number, got -1.0"),
        ({"learner": GaussianProcessHead(kernel="rbf", lengthscale=np.nan)}, "lengthscale: expected a positive number"),
        ({"learner": GaussianProcessHead(power=0)}, "GaussianProcessHead: power: expected a positive number, got 0"),
        ({"learner": GaussianProcessHead(lengthscale=1.0)}, "kernel.log_lengthscale: no such setting"),
        (
            {"learner": "softmax"},
            "expected a head, .* or a Learner as learner, got 'softmax'",
        ),
        ({"learner": LAPLACE, "draws": "many"}, "expected draws as an even number, 'auto' or None, got 'many'"),
        ({"learner": LAPLACE, "draws": 3}, "MonteCarlo needs an even number of draws"),
        ({"learner": REGRESSION, "temperature": 0}, "expected a number from 1.2e-38 to 1e.06 as temperature, got 0"),
        ({"learner": REGRESSION, "temperature": 1e-45}, "as temperature, got 1e-45"),
        ({"learner": REGRESSION, "temperature": 1e7}, "as temperature, got 10000000.0"),
        ({"learner": REGRESSION, "temperature_of_fewer": 1.0}, "as temperature, got 'auto'"),
        ({"learner": TrainedRun("nowhere")}, "no run in .*nowhere"),
    ]
    for parameters, message in cases:
        with pytest.raises(ValueError, match=message) as caught:  # set, as annotations are checked in these tests
            FewShotClassifier().set_params(**parameters).fit(features, labels)
        assert "\n" not in str(caught.value)


def test_one_example_of_each_of_many_classes_is_no_warning(recwarn):
    FewShotClassifier(NearestNeighbour(Identity((1, 1, 30)))).fit(np.eye(30), np.arange(30))
    assert not recwarn.list


@pytest.mark.parametrize("offset", [0, 100, 3000])
def test_the_nearest_neighbour_is_found_wherever_features_lie(offset):
    """Also where the squares of features, in single precision, hold none of their differences."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(125, 64)).astype(np.float32) + np.float32(offset)
    examples, queries = features[:25].astype(np.float64), features[25:].astype(np.float64)
    nearest = np.square(queries[:, None] - examples).sum(2).argmin(1)
    fitted = FewShotClassifier(NearestNeighbour(Identity((1, 1, 64)))).fit(features[:25], np.arange(25))
    np.testing.assert_array_equal(fitted.predict(features[25:]), nearest)


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-10, 1e6])
def test_answers_are_probabilities_at_any_temperature(temperature):
    features, labels = clusters()
    others = np.random.default_rng(0).normal(size=(20, features.shape[1]))  # of no cluster: no answer is certain
    p = FewShotClassifier(REGRESSION, temperature=temperature).fit(features, labels).predict_proba(others)
    np.testing.assert_allclose(p.sum(1), 1.0, rtol=1e-5)
    assert (p.max(1) == 1).all() if temperature < 1 else np.ptp(p) < 1e-4


def test_examples_and_labels_that_are_none_are_refused_in_one_line():
    features, labels = clusters()
    numbers = list(range(len(labels) - 1))
    cases = [
        (
            features,
            [*numbers, "elm"],
            r"labels of one kind, got numbers \(0\) and words \('elm'\); convert them",
        ),
        (features, np.array([*numbers, "elm"], object), "expected labels of one kind, got numbers"),
        (features, [*numbers, True], "got numbers .* and truth values"),
        (features, pd.Series([*labels[1:], None]), "expected a label for every example, got (None|nan)"),
        (features, [pd.NA, *labels[1:]], "expected a label for every example, got <NA>"),
        (features, None, "requires y to be passed"),
        ("scans", labels, "expected a list of paths, got 'scans'"),
        (["no.png"] * len(labels), labels, r"expected features \[N, D\], got pictures; give an encoder"),
        (np.zeros((len(labels), 8, 8, 3), np.uint8), labels, r"expected features \[N, D\], got pictures"),
        (np.full_like(features, 1e300), labels, r"expected numbers below 3.4e\+38 as X, got 1e\+300; use another unit"),
    ]
    for X, y, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            FewShotClassifier(REGRESSION).fit(X, y)
        assert "\n" not in str(caught.value)
    fitted = FewShotClassifier(REGRESSION).fit(features, labels)
    before = fitted.predict_proba(features)
    with pytest.raises(ValueError, match="expected labels like ash, got 3; convert them"):
        fitted.add(features[:1], [3])
    np.testing.assert_array_equal(fitted.predict_proba(features), before)


@pytest.mark.long
def test_the_seed_is_a_number_a_generator_or_nothing():
    features, labels = clusters()
    model = FewShotClassifier(LAPLACE, draws=64, temperature=1.0)
    seeds = {"0": 0, "again": np.int64(0), "1": 1, "drawn": np.random.RandomState(0), "none": None, "last": 2**32 - 1}
    fits = {
        name: clone(model).set_params(random_state=seed).fit(features, labels).predict_proba(features)
        for name, seed in seeds.items()
    }
    np.testing.assert_array_equal(fits["0"], fits["again"])
    others = [fits[name] for name in ("0", "1", "drawn", "none", "last")]
    assert all((one != other).any() for one, other in itertools.combinations(others, 2))


def test_labels_come_back_as_they_were_given():
    features, _ = clusters(2)
    for labels in ([True, False] * 3, [3, 1, 2] * 2, [1.0, 2.0] * 3, list("abcabc"), np.array(list("abcabc"), object)):
        fitted = FewShotClassifier(REGRESSION, temperature=1.0).fit(features, labels)
        assert fitted.classes_.dtype == np.asarray(labels).dtype and set(fitted.predict(features)) <= set(labels)


# What it says beside probabilities


@pytest.mark.long
@double
def test_latents_are_those_of_the_task_itself():
    """Unpadded, by the algebra alone; under label regression, whose posterior is exact."""
    deep_kernel = DeepKernel(Identity((1, 1, 4)), KERNELS["rbf"](), rngs=nnx.Rngs(0))
    likelihood, rng = LabelRegression(0.3), np.random.default_rng(0)
    x, new, y = rng.normal(size=(7, 4)), rng.normal(size=(3, 4)), np.array([0, 1, 2, 0, 1, 2, 2])
    learner = GaussianProcess(deep_kernel, likelihood, exact)
    found = FewShotClassifier(learner, balanced=False).fit(x, y).predict_latent(new)
    images = [jnp.asarray(part)[:, None, None] for part in (x, new)]
    posterior = run(jax.random.key(0), exact(likelihood), deep_kernel.prior(images[0], 3), jnp.asarray(y), steps=1)
    expected = posterior.predict(deep_kernel.query(*images, 3))
    np.testing.assert_allclose(found.mean, expected.mean.T, rtol=1e-9)
    np.testing.assert_allclose(found.covariance, expected.covariance_blocks(), atol=1e-12)
    np.testing.assert_allclose(found.variance, expected.variance.T, rtol=1e-9)


@double
def test_latents_of_a_mixture_have_its_moments():
    """E f f^T of the mixture is the mean of V_m + m_m m_m^T; padded classes, which come last, are left out."""
    rng = np.random.default_rng(0)
    parts = Marginals(jnp.asarray(rng.normal(size=(6, 4, 5))), jnp.asarray(rng.uniform(0.1, 1, size=(6, 4, 5))))
    state = SimpleNamespace(posterior=SimpleNamespace(predict=lambda query: parts))

    class Pool(Learner):
        likelihood = Softmax()

        def latent_query(self, state, query):
            return query

        def squared_distances(self, inputs, weights, query):
            raise NotImplementedError

    mean, covariance = conditioning._latents(Pool(), 3, jax.random.key(0), state, jnp.zeros(5))
    m, v = np.asarray(parts.mean)[:, :3], np.asarray(parts.variance)[:, :3]
    second = (np.einsum("mcq,mdq->qcd", m, m) + np.einsum("mcq,cd->qcd", v, np.eye(3))) / 6
    np.testing.assert_allclose(mean, m.mean(0).T, rtol=1e-12)
    np.testing.assert_allclose(covariance + np.einsum("qc,qd->qcd", mean, mean), second, rtol=1e-9)


def information(mean, covariance, order=60):
    """I(label; f) of two logits by quadrature in their difference, as a difference of two entropies."""
    z, weights = np.polynomial.hermite_e.hermegauss(order)
    variance = np.einsum("c,qcd,d->q", [1, -1], covariance, [1, -1])
    d = (mean[:, 0] - mean[:, 1])[:, None] + np.sqrt(variance)[:, None] * z
    p, weights = 1 / (1 + np.exp(-d)), weights / weights.sum()

    def entropy(p):
        return entr(p) + entr(1 - p)

    return entropy(p @ weights) - entropy(p) @ weights


@pytest.mark.long
def test_information_is_what_the_latents_would_tell_of_the_label():
    """Of two classes; those that the task is padded with are not among them."""
    features, labels = clusters(3, classes=2)
    fitted = FewShotClassifier(GaussianProcessHead(kernel="rbf", inference="laplace"), temperature=1.0).fit(
        features, labels
    )
    near, far = clusters(3, classes=2, seed=1)[0], -features
    for queries in (near, far):
        latents = fitted.predict_latent(queries)
        expected = information(latents.mean, latents.covariance)
        np.testing.assert_allclose(fitted.task_.information(queries), expected, rtol=2e-2, atol=1e-3)
    assert fitted.unknown_score(far).min() > fitted.unknown_score(near).max()


@pytest.mark.long
@pytest.mark.parametrize("name", ["gaussian-process", "photographs", "nearest-neighbour", "logistic-regression"])
def test_what_was_asked_before_compiles_nothing(name, compiled):
    """Also of another task: what a process compiles it never gives back."""
    latents, width = name in ("gaussian-process", "photographs"), 1280 if name == "photographs" else 6
    learner = {
        "gaussian-process": GaussianProcessHead(),
        "photographs": PretrainedHead("photographs"),
        "nearest-neighbour": NearestNeighbour(Identity((1, 1, 6))),
        "logistic-regression": LogisticRegression(Identity((1, 1, 6))),
    }[name]

    def ask(seed):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(12, width)).astype(np.float32), rng.permutation(np.repeat(np.arange(3), 4))
        fitted = FewShotClassifier(learner).fit(x, y)
        asked = [fitted.predict_proba, fitted.reject, fitted.unknown_score, fitted.unknown_p_value, fitted.suggest]
        for question in asked + latents * [fitted.predict_latent, partial(fitted.suggest, by="information")]:
            question(2 * x)
        fitted.add(x[:3], np.array([0, 0, 1])).predict(x)  # whose classes have unlike numbers
        fitted.unknown_p_value(2 * x)

    ask(0)
    assert compiled()
    ask(1)
    assert compiled() == []


def test_learners_without_latent_functions_say_so():
    features, labels = clusters()
    fitted = FewShotClassifier(NearestNeighbour(Identity((1, 1, 6))), temperature=1.0).fit(features, labels)
    assert fitted.unknown_score(features).max() < 1e-6  # the entropy of a one-hot row
    for ask in (fitted.predict_latent, partial(fitted.suggest, by="information")):
        with pytest.raises(TypeError, match="expected a learner with a posterior of latent functions, got NearestN"):
            ask(features)
    assert fitted.suggest(features, 2).utility.tolist() == [0.0, 0.0]  # one-hot rows


@pytest.mark.parametrize("wanted", [0.5, 0.7, 0.8, 0.97])
def test_as_many_are_kept_as_the_wanted_accuracy_allows(wanted):
    """Of all 2^9 sets none with that mean is larger."""
    p = np.random.default_rng(0).dirichlet([1.0, 1.0, 1.0], 9)
    kept, confidence = kept_at(p, wanted), p.max(1)
    sets = [np.array(one) for one in itertools.product([False, True], repeat=9)]
    largest = max(one.sum() for one in sets if not one.any() or confidence[one].mean() >= wanted)
    assert kept.sum() == largest and (not kept.any() or confidence[kept].mean() >= wanted)


def test_kept_answers_reach_the_wanted_accuracy_where_probabilities_are_calibrated():
    rng = np.random.default_rng(0)
    p = rng.dirichlet([0.1] * 5, 200_000)
    truth = (p.cumsum(1) > rng.random((len(p), 1))).argmax(1)
    kept = kept_at(p, 0.95)
    assert 0.3 < kept.mean() < 0.9
    assert (p.argmax(1) == truth)[kept].mean() == pytest.approx(0.95, abs=3e-3)
    assert kept_at(p[:0], 0.9).shape == (0,) and kept_at(np.eye(3), 1.0).all()
    for wrong in (0.0, 1.5, np.nan):
        with pytest.raises(ValueError, match="expected an accuracy above 0 and at most 1"):
            kept_at(p, wrong)


def test_answers_say_what_is_kept():
    features, labels = clusters()
    fitted = FewShotClassifier(REGRESSION, temperature=0.2).fit(features, labels)
    queries = np.concatenate([clusters(seed=1)[0], np.random.default_rng(0).normal(size=(9, 6))])
    p, answers = fitted.predict_proba(queries), fitted.reject(queries, 0.8)
    np.testing.assert_array_equal(answers.kept, kept_at(p, 0.8))
    assert 0 < answers.kept.sum() < len(queries) and 0.8 <= answers.expected_accuracy < 0.9
    np.testing.assert_array_equal(answers.labels, fitted.predict(queries))
    assert np.isnan(fitted.reject(queries, 1.0).expected_accuracy)


# Networks, pictures, runs


@pytest.mark.long
def test_predictions_have_no_draws_unless_these_are_asked_for():
    features, labels = clusters()
    for draws, summed in (("auto", True), (64, False), (None, False)):
        fitted = FewShotClassifier(draws=draws, temperature=0.5).fit(features, labels)
        assert fitted.task_.learner.likelihood.summed is summed
        answers = replace(fitted.task_, key=jax.random.key(1)).probabilities(fitted.task_.inputs)
        assert np.array_equal(answers, fitted.task_.probabilities(fitted.task_.inputs)) is summed


def test_a_column_whose_digits_are_lost_is_named():
    """Time stamps: neighbours are one number in single precision."""
    features, labels = clusters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FewShotClassifier(REGRESSION).fit(features + 1e3, labels)
    stamped = features + np.array([0, 0, 1.7e9, 0, 0, 0])
    with pytest.warns(UserWarning, match=r"got column 2 with mean 1.7e\+09 and deviation .*; centre it"):
        FewShotClassifier(REGRESSION).fit(stamped, labels)


@pytest.mark.long
@pytest.mark.parametrize("counts", [(4, 4, 4), (7, 3, 5)])
@pytest.mark.parametrize("kernel", ["cosine", "rbf"])
def test_the_order_of_rows_changes_nothing(counts, kernel):
    """Neither which examples are left out together for the task's temperature, nor which are shown as means."""
    features, labels = clusters(count=7)
    rows = np.concatenate(
        [np.flatnonzero(labels == name)[:count] for name, count in zip(np.unique(labels), counts, strict=True)]
    )
    x, y = features[rows], labels[rows]
    head = GaussianProcessHead(kernel=kernel)
    expected = FewShotClassifier(head).fit(x, y)
    assert len(expected.temperatures_.temperatures) > 1
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(y))
        found = FewShotClassifier(head).fit(x[order], y[order])
        np.testing.assert_array_equal(found.predict_proba(features), expected.predict_proba(features))
    half = len(y) // 2
    grown = FewShotClassifier(head).fit(x[order[:half]], y[order[:half]]).add(x[order[half:]], y[order[half:]])
    np.testing.assert_array_equal(grown.predict_proba(features), expected.predict_proba(features))


@pytest.mark.long
def test_labels_are_added_without_the_old_images(tiny_run, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (9, 16, 16, 1)).astype(np.uint8)
    fitted = FewShotClassifier.from_run(tiny_run.path).fit(images[:6], list("aabbcc"))
    seen, plain = [], conditioning.embed_images

    def embed_images(learner, images, chunk):
        seen.append(len(images))
        return plain(learner, images, chunk=chunk)

    monkeypatch.setattr(conditioning, "embed_images", embed_images)
    fitted.add(images[6:8], ["c", "d"])
    assert seen == [2] and list(fitted.classes_) == list("abcd")


@pytest.fixture
def pictures(tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (7, 16, 16, 1)).astype(np.uint8)
    images[:, [0, -1]] = images[:, :, [0, -1]] = 0  # dark ground: not inverted
    for number, image in enumerate(images):
        Image.fromarray(image.squeeze(-1)).save(tmp_path / f"{number}.png")
    return images, [tmp_path / f"{number}.png" for number in range(len(images))]


@pytest.mark.long
def test_a_run_that_was_trained_again_does_not_answer_for_what_was_fitted(tiny_run, tmp_path):
    for name in ("config.json", "weights.safetensors"):
        (tmp_path / name).write_bytes((tiny_run.path / name).read_bytes())
    images = np.random.default_rng(0).integers(0, 256, (7, 16, 16, 1)).astype(np.uint8)
    fitted = FewShotClassifier.from_run(tmp_path, temperature=1.0).fit(images[:6], list("aabbcc"))
    pickled, before = pickle.dumps(fitted), fitted.predict_proba(images)
    tree, metadata = weights.load(tmp_path / "weights.safetensors")
    other = jax.tree.map(lambda leaf: 0.9 * leaf if leaf.dtype.kind == "f" else leaf, tree)
    weights.save(tmp_path / "weights.safetensors", other, metadata)
    message = r"expected TrainedRun\(.*\) as it was when this was fitted, got other weights; fit again"
    with pytest.raises(RunError, match=message):
        pickle.loads(pickled).predict_proba(images)
    with pytest.raises(RunError, match=message):
        fitted.add(images[6:], ["a"])
    np.testing.assert_array_equal(fitted.predict_proba(images), before)
    assert not np.array_equal(fitted.fit(images[:6], list("aabbcc")).predict_proba(images), before)


@pytest.mark.long
def test_paths_are_read_as_the_run_reads_pictures(tiny_run, pictures, tmp_path):
    images, paths = pictures
    own = load_run(tiny_run.path)
    expected = FewShotClassifier(own.learner, temperature=own.temperature, temperature_of_fewer=own.temperature)
    expected = expected.fit(images[:4], list("aabb")).predict_proba(images[4:])
    fitted = FewShotClassifier.from_run(str(tiny_run.path)).fit(paths[:4], list("aabb"))
    words = [str(path) for path in paths[4:]]
    opened = [Image.open(path) for path in paths[4:]]
    for given in (paths[4:], words, pd.Series(words), pd.DataFrame({"path": words}), np.array(words)[:, None], opened):
        np.testing.assert_array_equal(fitted.predict_proba(given), expected)
    np.testing.assert_array_equal(fitted.predict_proba(images[4:].squeeze(-1)), expected)  # grey, without channels
    with pytest.raises(ValueError, match=r"expected an image in .*no\.png"):
        fitted.predict([*paths[4:], "no.png"])
    cut = tmp_path / "cut.png"
    cut.write_bytes(paths[0].read_bytes()[:-30])
    message = r"expected an image in .*cut\.png, got one that cannot be read"
    with Image.open(cut) as damaged, pytest.raises(ValueError, match=message):
        fitted.predict([damaged])
    assert not hasattr(fitted, "n_features_in_")


def test_a_run_with_its_data_has_the_temperature_of_the_task(tiny_run, monkeypatch):
    asked = []
    fitted = heads.shape_temperature.Temperatures(0.5, 0.4)
    monkeypatch.setattr(heads.shape_temperature, "for_user", lambda *given: asked.append(given[1:]) or fitted)
    built = TrainedRun(str(tiny_run.path), "somewhere").build(None)
    assert [built.temperature(counts)[:2] for counts in ([2, 2, 3], [2, 3, 2])] == [fitted] * 2
    assert asked == [(3, 2, "somewhere")]
    own = load_run(tiny_run.path).temperature
    assert TrainedRun(str(tiny_run.path)).build(None).temperature([1, 1])[:2] == (own, None)


def test_more_classes_and_examples_ask_for_a_larger_temperature():
    """As measured (docs/results/untrained.md): 2-way 2-shot -1.73, 5-way 1-shot -1.60, 10-way 2-shot -1.30."""
    own, fewer = ([heads.untrained(counts)[k] for counts in ([2] * 2, [1] * 5, [2] * 10)] for k in (0, 1))
    np.testing.assert_allclose(np.log(own), [-1.73, -1.60, -1.30], atol=0.01)
    assert fewer[1] == own[1] and fewer[2] == heads.untrained([1] * 10).own < own[2]
    assert GaussianProcessHead().build(3).temperature([2, 2]) == heads.untrained([2, 2])
    assert GaussianProcessHead("gaussian").build(3).temperature([2, 2]) == heads.UNKNOWN


@pytest.mark.parametrize("kernel, chosen, power", [("cosine", None, 0.7), ("rbf", None, 1.0), ("cosine", 1.3, 1.3)])
def test_features_are_raised_to_a_power_with_their_signs(kernel, chosen, power):
    x = np.random.default_rng(0).normal(size=(12, 6))
    raised = np.sign(x) * np.abs(x) ** power

    def predicted(features, own):
        head = GaussianProcessHead(likelihood="gaussian", kernel=kernel, power=own)
        return FewShotClassifier(head, temperature=0.5).fit(features[:6], list("aabbcc")).predict_proba(features[6:])

    found = predicted(x, chosen)
    np.testing.assert_allclose(found, predicted(raised, 1.0), atol=1e-4)
    for other in {0.7, 1.0, 1.3} - {power}:
        assert not np.allclose(found, predicted(x, other), atol=1e-2)


class Means:
    """An encoder: the mean colour of each quarter of a picture."""

    name, image_size, features, identity = "means", 4, 12, "means-1"

    def __init__(self):
        self.seen = 0

    def prepare(self, pictures):
        shrunk = [Image.fromarray(np.asarray(one)).convert("RGB").resize((4, 4)) for one in pictures]
        return np.stack([np.asarray(one) for one in shrunk])

    def encode(self, pictures):
        self.seen += len(pictures)
        return pictures.reshape(-1, 2, 2, 2, 2, 3).mean((2, 4)).reshape(-1, 12).astype(np.float32) / 255


def test_an_encoder_sees_each_picture_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images = np.random.default_rng(0).integers(0, 256, (8, 6, 6, 3)).astype(np.uint8)
    paths = [tmp_path / f"{number}.png" for number in range(8)]
    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image).save(path)
    encoder = Means()
    fitted = FewShotClassifier(REGRESSION, encoder=encoder).fit(paths[:6], list("aabbcc"))
    assert encoder.seen == 6
    p = fitted.predict_proba(paths)
    assert encoder.seen == 8
    np.testing.assert_array_equal(fitted.predict_proba(images), p)  # the same pictures, as bytes
    np.testing.assert_array_equal(fitted.predict_proba([Image.open(path) for path in paths]), p)
    assert fitted.predict_proba(images[:0]).shape == fitted.predict_proba([]).shape == (0, 3)
    unlike = [images[0], images[1, :5], images[2, :, :, 0]]  # sizes, and grey
    pictures = [Image.fromarray(one) for one in unlike]
    np.testing.assert_array_equal(fitted.predict_proba(unlike), fitted.predict_proba(pictures))
    wanted = "expected the path of a picture for every example"
    for given, message in (
        ([paths[0], None], f"{wanted}, got NoneType as number 1"),
        (pd.Series([str(paths[0]), np.nan]), f"{wanted}, got float as number 1"),
        ([images[0], paths[1]], f"{wanted}, got ndarray as number 0"),
        ([pictures[0], images[1]], "expected a picture of Pillow's for every example, got ndarray as number 1"),
        (pictures[0], "expected a list of pictures, got one; put it into a list"),
        ([[1.0, 2.0], [3.0]], "expected examples of one shape, got a list of unlike ones"),
    ):
        with pytest.raises(ValueError, match=message):
            fitted.predict_proba(given)
    with pytest.raises(ValueError, match="expected labelled examples, got none"):
        FewShotClassifier(REGRESSION, encoder=encoder).fit([], [])
    features = encoder.encode(encoder.prepare(images))
    np.testing.assert_allclose(fitted.predict_proba(features), p, atol=1e-6)  # features are taken as they are


def test_what_is_shipped_comes_with_its_encoder_and_temperatures(monkeypatch):
    head = GaussianProcessHead(likelihood="gaussian")
    table = TemperatureTable((2, 3), (1, 2, 3), np.log([[0.3, 0.4, 0.5], [0.6, 0.7, 0.9]]))
    shipped = Pretrained("photographs", Run(head._configuration(), head.build(6).learner), "means", table)
    monkeypatch.setattr(heads, "_pretrained", lambda name: shipped)
    model = FewShotClassifier.from_pretrained("photographs", random_state=2)
    assert model.get_params(deep=True)["learner__name"] == "photographs"
    assert (model.encoder, model.random_state) == ("means", 2) and isinstance(model.learner, PretrainedHead)
    assert model.learner.build(6).temperature([2, 1, 3])[:2] == (table.at([2, 1, 3]), table.at([1, 1, 2]))
    assert model.learner.build(6).temperature([1, 1])[:2] == (table.at([1, 1]), None)
    features, labels = clusters()
    assert model.fit(features, labels).score(features, labels) > 0.9


@pytest.fixture
def two_kinds(monkeypatch, tmp_path):
    """Shipped weights of 6 features, special ones of another scale for what lies along the first axis."""
    table = TemperatureTable((2, 3), (1, 2), np.log([[0.5, 0.5], [0.5, 0.5]]))

    def ship(name, scale, kind=None):
        head = GaussianProcessHead(likelihood="gaussian", scale=scale)
        run = Run(head._configuration(), head.build(6).learner)
        pretrained.store(tmp_path / f"{name}.safetensors", run, table, kind=kind)

    ship("photographs", 30.0)
    ship("photographs-flowers", 3.0, Kind(np.eye(6)[:1], 0.8))
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
    monkeypatch.setitem(pretrained.SPECIAL, "photographs", ("photographs-flowers",))
    heads._pretrained.cache_clear()
    yield FewShotClassifier.from_pretrained("photographs")
    heads._pretrained.cache_clear()


def test_labelled_examples_choose_the_head_of_their_kind(two_kinds, tmp_path):
    """It stays with what was fitted: `add`, pickles and files keep it; `fit` chooses anew."""
    features, labels = clusters()
    along = features + 20 * np.eye(6)[0]
    fitted = clone(two_kinds).fit(along, labels)
    assert fitted.head_.name == "photographs-flowers" and fitted.learner.name == "photographs"
    fitted.save(tmp_path / "a")
    models = [fitted, FewShotClassifier.load(tmp_path / "a"), pickle.loads(pickle.dumps(fitted))]
    alone = FewShotClassifier(PretrainedHead("photographs-flowers")).fit(along, labels)
    before = alone.predict_proba(along)
    after = alone.add(-along[:2], labels[:2]).predict_proba(along)
    for one in models:
        np.testing.assert_array_equal(one.predict_proba(along), before)
        np.testing.assert_array_equal(one.add(-along[:2], labels[:2]).predict_proba(along), after)
        assert one.head_.name == "photographs-flowers" and one.learner.name == "photographs"
    assert fitted.fit(-along, labels).head_.name == "photographs"


def test_features_of_another_width_than_a_shipped_head_reads_are_refused_in_one_line(two_kinds):
    features, labels = clusters()
    for name in ("photographs", "photographs-flowers"):
        with pytest.raises(ValueError, match=r"^expected features \[N, 6\], got 4 a row; use the encoder"):
            FewShotClassifier.from_pretrained(name).fit(features[:, :4], labels)


def test_logarithms_of_probabilities_are_those_of_predict_proba():
    features, labels = clusters()
    fitted = FewShotClassifier(REGRESSION).fit(features, labels)
    np.testing.assert_array_equal(fitted.predict_log_proba(features), np.log(fitted.predict_proba(features)))


def test_the_logarithm_of_a_probability_of_0_is_no_warning(recwarn):
    features, labels = clusters()
    fitted = FewShotClassifier(REGRESSION, temperature=1e-10).fit(features, labels)
    found = fitted.predict_log_proba(features)
    assert (found.max(1) == 0).all() and (found.min(1) == -np.inf).all() and not recwarn.list


def test_parameters_of_a_head_that_was_not_given_are_refused_in_one_line():
    model = FewShotClassifier()
    with pytest.raises(ValueError, match=r"expected a head before learner__kernel, got None; give learner=Gaussian"):
        model.set_params(learner__kernel="cosine")
    assert model.set_params(learner=GaussianProcessHead(), learner__kernel="cosine").learner.kernel == "cosine"
    assert model.set_params(draws=64) is model and model.draws == 64


@pytest.mark.long
def test_an_encoder_with_a_shipped_head_takes_it():
    features = np.random.default_rng(0).normal(size=(6, 1280))
    features[::2] += 0.5
    by_name, by_encoder = (
        model.fit(features, list("ababab"))
        for model in (FewShotClassifier.from_pretrained("photographs"), FewShotClassifier(encoder="efficientnet-lite0"))
    )
    np.testing.assert_array_equal(by_encoder.predict_proba(features), by_name.predict_proba(features))
    assert not isinstance(FewShotClassifier(encoder="onnx:a.onnx")._head(), PretrainedHead)
