"""The deep kernel: prior and query it hands to inference, and its life inside NumPyro's SVI."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from flax import nnx
from numpyro.contrib.module import nnx_module
from numpyro.infer import SVI, Trace_ELBO
from problems import double

from fewshot import models
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.process import LatentProcess

SHAPE = (16, 16, 1)
CELLS = [("mlp", "cosine-bn"), ("mlp", "poly1"), ("identity", "rbf")]


def build(backbone="mlp", kernel="cosine-bn", classes=3, mean=None):
    rngs = nnx.Rngs(0)
    width = {} if backbone == "identity" else {"width": 8}
    network = models.BACKBONES[backbone](SHAPE, rngs=rngs, **width)
    return DeepKernel(network, models.KERNELS[kernel](), rngs=rngs, classes=classes, mean=mean)


def images(seed, *leading):
    return jax.random.randint(jax.random.key(seed), (*leading, *SHAPE), 0, 256).astype(jnp.uint8)


@pytest.mark.long
@double
@pytest.mark.parametrize("name", models.KERNELS)
def test_squared_distances_are_those_of_feature_vectors(name):
    """Of vectors with the joint Gram matrix, whatever feature map the kernel has; no weights are the mean 0."""
    kernel = models.KERNELS[name]()
    process = LatentProcess(kernel, {key: jnp.asarray(value + 0.3) for key, value in kernel.initial().items()})
    rng = np.random.default_rng(0)
    x, new = jnp.asarray(rng.normal(size=(6, 4))), jnp.asarray(rng.normal(size=(5, 4)))
    weights = np.array([[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.2, 0.3, 0.5, 0], [0] * 6]).T
    both = jnp.concatenate([x, new])
    values, vectors = np.linalg.eigh(np.asarray(process.kernel.gram(process.hyper, both, both)))
    features = vectors * np.sqrt(np.maximum(values, 0))
    expected = ((features[6:, None] - weights.T @ features[:6]) ** 2).sum(-1)
    found = process.squared_distances(x, jnp.asarray(weights), new)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("backbone", "kernel"), CELLS)
def test_prior_and_query_are_the_kernel_of_the_features(backbone, kernel):
    model = build(backbone, kernel)
    support, query = images(1, 6), images(2, 4)
    prior, new, both = nnx.jit(
        lambda model, s, q: (model.prior(s), model.query(s, q), model.prior(jnp.concatenate([s, q])))
    )(model, support, query)
    together = both.covariance
    assert isinstance(prior, GaussianPrior)
    assert isinstance(new, Query)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(prior.covariance, together[:6, :6], **tolerance)
    np.testing.assert_allclose(new.cross, together[6:, :6], **tolerance)
    np.testing.assert_allclose(new.variance, np.diag(together)[6:], **tolerance)
    assert prior.mean.shape == (3, 6)
    assert new.mean.shape == (3, 4)
    if prior.root is not None:
        np.testing.assert_allclose(prior.root @ prior.root.T, prior.covariance, **tolerance)


def test_a_learned_mean_is_that_of_support_and_queries_alike():
    """(G7) goes back to it far from the data; its prior is centred where it starts."""
    model = build("identity", "linear", mean=-3.0)
    assert float(model.priors()["mean"].loc) == model.hyperparameters()["mean"] == -3.0
    model.hyper["mean"][...] = jnp.asarray(-4.0)
    prior, query = model.prior(images(1, 6)), model.query(images(1, 6), images(2, 4))
    assert prior.mean.shape == (3, 6) and (prior.mean == -4).all()
    assert query.mean.shape == (3, 4) and (query.mean == -4).all()


def test_bytes_and_numbers_give_the_same_features():
    model, x = build(), images(3, 1, 5)
    np.testing.assert_allclose(model(x, False), model(x / 255.0, False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", list(models.KERNELS))
def test_features_are_standardised_where_the_kernel_asks(kernel):
    model = build("mlp", kernel)
    features = model(images(4, 2, 9), True)
    asked = models.KERNELS[kernel]().normalise_features
    assert bool(jnp.abs(features.mean(1)).max() < 1e-4) == asked
    assert (model.norm is not None) == asked
    assert ("norm" in nnx.state(model, nnx.Param)) == (kernel == "cosine-bn")


def test_hyperparameters_are_learned_parameters():
    model = build("identity", "poly1")
    assert {name: float(value) for name, value in model.hyperparameters().items()} == pytest.approx(
        model.kernel.initial()
    )
    model.hyper["log_scale"][...] = jnp.asarray(0.0)
    x = images(5, 4)
    np.testing.assert_allclose(
        model.prior(x).covariance,
        model.kernel.gram({"log_scale": 0.0, "log_offset": 0.0}, model.features(x), model.features(x)),
    )


def test_classes_and_image_shape_are_checked_in_one_line():
    with pytest.raises(ValueError, match="number of classes, got None: pass classes="):
        build("identity", classes=None).prior(images(6, 2))
    assert build("identity", classes=None).prior(images(6, 2), classes=7).mean.shape == (7, 2)
    with pytest.raises(ValueError, match=r"expected images of shape \(16, 16, 1\), got \(20, 16, 1\)"):
        build("identity").prior(jnp.zeros((2, 20, 16, 1)))


def test_everything_runs_in_float64():
    with jax.enable_x64(True):
        for backbone, kernel in CELLS:
            prior = nnx.jit(DeepKernel.prior)(build(backbone, kernel), images(7, 3))
            assert {leaf.dtype.name for leaf in jax.tree.leaves(prior)} == {"float64"}


def test_free_functions_map_over_tasks():
    kernel = models.KERNELS["rbf"]()
    hyper, features = {"log_scale": 0.1, "log_lengthscale": 0.2}, jax.random.normal(jax.random.key(8), (2, 5, 6))
    priors = jax.jit(jax.vmap(lambda f: LatentProcess(kernel, hyper).prior(f, 3)))(features)
    queries = jax.jit(jax.vmap(lambda f: LatentProcess(kernel, hyper).query(f[:3], f[3:], 3)))(features)
    for task in range(2):
        alone = jax.jit(lambda f: LatentProcess(kernel, hyper).prior(f, 3))(features[task])
        np.testing.assert_allclose(priors.covariance[task], alone.covariance, rtol=1e-5)
        np.testing.assert_allclose(queries.cross[task], alone.covariance[3:, :3], rtol=1e-5)


@pytest.mark.slow
def test_trains_inside_numpyro_svi_under_scan():
    """Parameters move, batch statistics travel as mutable state, and a loop of updates equals the scan."""
    module = build("conv4", "cosine-bn")
    x = images(9, 4, 2, 6) / 255.0

    def model(x):
        features = nnx_module("net", module)(x, True)
        numpyro.factor("fit", -((features - 1.0) ** 2).mean())

    svi = SVI(model, lambda x: None, optax.adam(1e-2), Trace_ELBO())
    start = jax.jit(svi.init)(jax.random.key(0), x[0])
    scanned, losses = jax.jit(lambda state: jax.lax.scan(svi.update, state, x))(start)
    looped, update = start, jax.jit(svi.update)
    for batch in x:
        looped, _ = update(looped, batch)
    assert jnp.isfinite(losses).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        (svi.get_params(scanned), scanned.mutable_state),
        (svi.get_params(looped), looped.mutable_state),
    )
    before, after = start.mutable_state["net$state"]["state"], scanned.mutable_state["net$state"]["state"]
    moved = jax.tree.map(lambda a, b: bool(jnp.abs(a - b).max() > 0), before, after)
    assert all(jax.tree.leaves(moved))
    kernel = svi.get_params(scanned)["net$params"]["backbone"]["block0"]["kernel"]
    assert jnp.abs(kernel - module.backbone.block0.kernel[...]).max() > 1e-3
