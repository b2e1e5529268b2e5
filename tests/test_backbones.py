"""Networks: shapes, batch statistics per task, and the fused convolution block against plain layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from problems import defined

from fewshot import models
from fewshot.models import backbones, convolution
from fewshot.models.backbones import MLP, Conv4, Conv4Maps, ConvBlock, ResidualBlock, ResNet12, TaskBatchNorm
from fewshot.models.convolution import EPSILON, PRECISIONS, conv3x3, max_pool, norm_relu_pool, pool_first
from fewshot.models.layers import linear


def plain_conv(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def plain_block(x, kernel, scale, shift, labelled=None):
    """Convolution, batch norm, ReLU, max-pool of x [T, N, H, W, Ch] in the usual order, left to autodiff.

    The statistics are those of the first, `labelled` images, None for all.

    Pooling is `reduce_window`, whose gradient is a select-and-scatter. The gradient of `jnp.max` over reshaped windows
    compares recomputed values for equality, which fails for some windows once XLA contracts a product and a sum.
    """
    z = plain_conv(x.reshape(-1, *x.shape[2:]), kernel)
    z = z.reshape(*x.shape[:2], *z.shape[1:])
    axes, rows = (1, 2, 3), z[:, :labelled]
    z = (z - rows.mean(axes, keepdims=True)) / jnp.sqrt(rows.var(axes, keepdims=True) + EPSILON)
    return max_pool(jax.nn.relu(scale * z + shift))


def apply(module, x, train):
    """module(x, train), compiled, with the module's state updated as in an eager call."""
    return nnx.jit(lambda module, x: module(x, train))(module, x)


def random_block(channels=3, width=4):
    """A block whose scales have both signs."""
    block = ConvBlock(channels, width, rngs=nnx.Rngs(0))
    block.norm.scale[...] = jnp.asarray([0.7, -1.3, 0.4, -0.2])
    block.norm.shift[...] = jnp.asarray([0.3, 0.1, -0.5, 0.2])
    return block


@pytest.mark.parametrize("labelled", [None, 2])
@pytest.mark.parametrize("size", [(6, 6), (7, 5)])
def test_fused_block_and_its_gradient_equal_plain_autodiff(size, labelled):
    with jax.enable_x64(True):
        block = random_block()
        block.set_attributes(normalised_by=labelled)
        x = jax.random.normal(jax.random.key(1), (2, 3, *size, 3)) + 1.5
        weights = jax.random.normal(jax.random.key(2), (2, 3, size[0] // 2, size[1] // 2, 4))
        graph, parameters, rest = nnx.split(block, nnx.Param, ...)

        def fused(parameters, x):
            return (weights * nnx.merge(graph, parameters, rest, copy=True)(x, True)).sum()

        def plain(parameters, x):
            norm = parameters["norm"]
            return (weights * plain_block(x, parameters["kernel"], norm["scale"], norm["shift"], labelled)).sum()

        mine, of_mine = jax.jit(jax.value_and_grad(fused, argnums=(0, 1)))(parameters, x)
        usual, of_usual = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(nnx.to_pure_dict(parameters), x)
        np.testing.assert_allclose(mine, usual, rtol=1e-10)
        for got, expected in zip(jax.tree.leaves(of_mine), jax.tree.leaves(of_usual), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


def test_fused_block_matches_finite_differences():
    with jax.enable_x64(True):
        z = jax.random.normal(jax.random.key(3), (2, 2, 5, 4, 3))
        scale, shift = jnp.asarray([0.5, 1.5, 0.2]), jnp.asarray([0.2, -0.1, 0.3])
        check_grads(jax.jit(lambda *a: norm_relu_pool(*a)[0]), (z, scale, shift), order=2, modes=["rev"])


def test_tied_maxima_share_the_gradient_equally():
    """A window of equal values, as on a blank background: each of k tied entries gets 1/k of what one would get."""
    with jax.enable_x64(True):
        z = np.random.default_rng(0).integers(0, 3, (1, 4, 6, 6, 2)).astype(float)
        windows = z.reshape(1, 4, 3, 2, 3, 2, 2)
        tied = windows == windows.max((3, 5), keepdims=True)
        weights = np.random.default_rng(1).normal(size=(1, 4, 3, 3, 2))
        standard = (windows.max((3, 5)) - z.mean((1, 2, 3))) / np.sqrt(z.var((1, 2, 3)) + EPSILON)
        pooled = (weights * (standard > 0))[:, :, :, None, :, None]
        direct = (tied * pooled / tied.sum((3, 5), keepdims=True)).reshape(z.shape)  # without the statistics' part
        normalised = (z - z.mean((1, 2, 3))) / np.sqrt(z.var((1, 2, 3)) + EPSILON)
        expected = direct - direct.mean((1, 2, 3)) - normalised * (direct * normalised).mean((1, 2, 3))
        expected /= np.sqrt(z.var((1, 2, 3)) + EPSILON)

        got = jax.jit(jax.grad(lambda z: (weights * norm_relu_pool(z, jnp.ones(2), jnp.zeros(2))[0]).sum()))(z)
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
def test_convolution_gradients_equal_autodiff(channels):
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(7), (3, 6, 5, channels))
        kernel = jax.random.normal(jax.random.key(8), (3, 3, channels, 4))
        weights = jax.random.normal(jax.random.key(9), (3, 6, 5, 4))
        mine = jax.jit(jax.grad(lambda *a: (weights * conv3x3(*a)).sum(), argnums=(0, 1)))(x, kernel)
        usual = jax.jit(jax.grad(lambda *a: (weights * plain_conv(*a)).sum(), argnums=(0, 1)))(x, kernel)
        for got, expected in zip(mine, usual, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("images", [2, 3, 4, 7])
def test_the_gradient_of_a_kernel_is_the_same_in_parts(images, monkeypatch):
    """Of two images each: one part, and more, the last of one image or of two."""
    monkeypatch.setattr(convolution, "WINDOW", 60)
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(7), (images, 6, 5, 3))
        kernel = jax.random.normal(jax.random.key(8), (3, 3, 3, 4))
        weights = jax.random.normal(jax.random.key(9), (images, 6, 5, 4))
        of = lambda convolve: jax.jit(jax.grad(lambda kernel: (weights * jnp.tanh(convolve(x, kernel))).sum()))  # noqa: E731
        np.testing.assert_allclose(of(conv3x3)(kernel), of(plain_conv)(kernel), rtol=1e-10, atol=1e-10)


def test_few_images_make_a_window_on_a_processor_and_all_on_a_gpu():
    """For a GPU there is no loop; on a processor none where the windows are small, as in second derivatives."""

    def windows(rows, images, platform):
        """How many images the largest kernel of a convolution has for inputs, and whether there is a loop."""
        x, kernel = jnp.ones((images, rows, rows, 64)), jnp.ones((3, 3, 64, 64))
        gradient = jax.jit(jax.grad(lambda kernel: conv3x3(x, kernel).sum()))
        text = gradient.trace(kernel).lower(lowering_platforms=(platform,)).as_text()
        sizes = re.findall(rf"stablehlo.convolution.* tensor<{rows}x{rows}x(\d+)x64xf32>\) ->", text)
        return max(map(int, sizes)), "stablehlo.while" in text

    assert windows(14, 85, "cpu") == (5, True) and windows(28, 85, "cpu") == (2, True)
    assert windows(3, 85, "cpu") == (85, False)
    assert windows(14, 85, "cuda") == (85, False)


@pytest.mark.parametrize(("height", "window"), [(1, 1000), (2, 1000), (6, 1000), (6, 60)])
def test_second_derivatives_of_a_convolution_equal_those_of_autodiff(height, window, monkeypatch):
    monkeypatch.setattr(convolution, "WINDOW", window)

    def of(convolve):
        """Both gradients of a step of descent, as MAML takes it."""

        def adapted(x, kernel):
            loss = lambda x, kernel: (jnp.tanh(convolve(x, kernel)) ** 2).sum()  # noqa: E731
            to_x, to_kernel = jax.grad(loss, argnums=(0, 1))(x, kernel)
            return loss(x - 0.1 * to_x, kernel - 0.1 * to_kernel)

        return jax.jit(jax.grad(adapted, argnums=(0, 1)))

    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(7), (3, height, 5, 2))
        kernel = jax.random.normal(jax.random.key(8), (3, 3, 2, 4))
        for got, expected in zip(of(conv3x3)(x, kernel), of(plain_conv)(x, kernel), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_of_a_convolution_and_its_gradients_have_the_precision_asked_for(precision):
    """In what is handed to the compiler: a CPU rounds nothing to TF32. All that is stored stays float32."""
    x, kernel = jnp.ones((2, 4, 4, 3)), jnp.ones((3, 3, 3, 5))
    network = jax.value_and_grad(lambda x, kernel: conv3x3(x, kernel, precision).sum(), argnums=(0, 1))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(jax.eval_shape(network, x, kernel)))
    text = jax.jit(network).lower(x, kernel).as_text()
    convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert len(convolutions) == 3
    word = {"float32": "HIGHEST", "tensorfloat32": "HIGH"}.get(precision, "DEFAULT")
    for line in convolutions:
        assert line.count(f"<precision = {word}>") + line.count(f"precision {word}") == 2, line
        assert line.count("bf16") == (3 if precision == "bfloat16" else 0)


def test_bfloat16_rounds_products_to_eight_bits():
    """Error of one convolution against float32: above 0, within the 2^-9 of inputs, weights and result together."""
    x = jax.random.normal(jax.random.key(20), (2, 8, 8, 16))
    kernel = jax.random.normal(jax.random.key(21), (3, 3, 16, 16))
    exact, rounded = (jax.jit(conv3x3, static_argnums=2)(x, kernel, name) for name in ("float32", "bfloat16"))
    error = jnp.sqrt(jnp.mean((rounded - exact) ** 2) / jnp.mean(exact**2))
    assert 1e-4 < error < 3 * 2**-9


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="one of auto, float32, tensorfloat32, bfloat16, got 'half'"):
        Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=4, precision="half")


def test_pooling_keeps_which_entry_was_the_largest():
    """Its gradient is that of `reduce_window` where maxima are unique; of equal ones the first gets all."""
    with jax.enable_x64(True):
        z = jax.random.normal(jax.random.key(22), (2, 3, 5, 6, 2))
        weights = jax.random.normal(jax.random.key(23), (2, 3, 2, 3, 2))
        mine, usual = (
            jax.jit(jax.grad(lambda z, pool=pool: (weights * pool(z)).sum())) for pool in (pool_first, max_pool)
        )
        np.testing.assert_array_equal(mine(z), usual(z))
        tied = np.array(mine(jnp.zeros_like(z)))
        np.testing.assert_array_equal(tied[:, :, :4:2, ::2], weights)
        tied[:, :, :4:2, ::2] = 0
        assert not tied.any()


def test_residual_block_and_its_gradient_equal_plain_layers():
    with jax.enable_x64(True):
        block = ResidualBlock(2, 4, rngs=nnx.Rngs(0), momentum=0.9, precision="auto")
        graph, parameters, rest = nnx.split(block, nnx.Param, ...)
        x = jax.random.normal(jax.random.key(24), (2, 3, 5, 4, 2))

        def mine(parameters, x):
            return (nnx.merge(graph, parameters, rest, copy=True)(x, True) ** 2).sum()

        def plain(parameters, x):
            def convolve(x, kernel):
                z = plain_conv(x.reshape(-1, *x.shape[2:]), kernel)
                z = z.reshape(*x.shape[:2], *z.shape[1:])
                axes = (1, 2, 3)
                return (z - z.mean(axes, keepdims=True)) / jnp.sqrt(z.var(axes, keepdims=True) + EPSILON)

            straight = convolve(x, parameters["shortcut"][None, None])
            for i in range(3):
                x = convolve(x, parameters[f"kernel{i}"])
                x = jax.nn.leaky_relu(x if i < 2 else x + straight, 0.1)
            return (max_pool(x) ** 2).sum()

        got, of_mine = jax.jit(jax.value_and_grad(mine, argnums=(0, 1)))(parameters, x)
        expected, of_plain = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(nnx.to_pure_dict(parameters), x)
        np.testing.assert_allclose(got, expected, rtol=1e-10)
        of_mine = (nnx.to_pure_dict(of_mine[0]), of_mine[1])
        for name in ("kernel0", "kernel1", "kernel2", "shortcut"):
            np.testing.assert_allclose(of_mine[0][name], of_plain[0][name], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(of_mine[1], of_plain[1], rtol=1e-9, atol=1e-9)


def test_resnet12_has_ten_times_its_width_of_features():
    network = nnx.eval_shape(lambda: ResNet12((84, 84, 3), rngs=nnx.Rngs(0)))
    assert network.features == 640
    assert network.block3.kernel2.get_value().shape == (3, 3, 640, 640)
    assert network.block1.shortcut.get_value().shape == (64, 160)
    with pytest.raises(ValueError, match="ResNet12 expects images of at least 16x16, got 12x28"):
        ResNet12((12, 28, 1), rngs=nnx.Rngs(0), width=2)
    with pytest.raises(ValueError, match="expects an even width, got 3"):
        ResNet12((16, 16, 1), rngs=nnx.Rngs(0), width=3)


def test_no_loop_convolution_has_unusual_axes():
    """Inside `lax.scan` XLA's CPU compiler runs any other order of axes as scalar code."""

    def step(kernel, x):
        gradient = jax.grad(lambda kernel, x: (conv3x3(x, kernel) ** 2).sum(), argnums=(0, 1))(kernel, x)
        return kernel - gradient[0], gradient[1]

    def squares(kernel, xs):
        return sum((leaf**2).sum() for leaf in jax.lax.scan(step, kernel, xs))

    kernel, xs = jnp.ones((3, 3, 2, 4)), jnp.ones((2, 3, 6, 6, 2))
    for function, count in ((squares, 3), (jax.grad(squares), 7)):
        text = jax.jit(function).lower(kernel, xs).as_text()
        convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
        assert len(convolutions) == count
        assert all("[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in line for line in convolutions)


@pytest.mark.parametrize("window", [100, 1000])
def test_second_derivatives_are_compiled_with_the_usual_axes(window, monkeypatch):
    """XLA may fold transposes into a convolution, and runs what it makes so ten times slower on a processor."""
    monkeypatch.setattr(convolution, "WINDOW", window)

    def adapted(kernels, x):
        def loss(kernels):
            first, second = kernels
            return (jnp.tanh(conv3x3(jnp.tanh(conv3x3(x, first)), second)) ** 2).sum()

        slopes = jax.grad(loss)(kernels)
        return loss([kernel - 0.1 * slope for kernel, slope in zip(kernels, slopes, strict=True)])

    kernels, x = [jnp.ones((3, 3, 2, 4)), jnp.ones((3, 3, 4, 4))], jnp.ones((7, 6, 6, 2))
    text = jax.jit(jax.grad(adapted)).lower(kernels, x).compile().as_text()
    axes = re.findall(r" convolution\(.* window={(.*)}, dim_labels=(\S+),", text)
    assert len(axes) > 9
    assert all(labels == "b01f_01io->b01f" and "reversal" not in window for window, labels in axes), axes


def test_constant_images_give_finite_features_and_gradients():
    block = random_block()
    x = jnp.full((1, 3, 6, 6, 3), 0.5)
    graph, parameters, rest = nnx.split(block, nnx.Param, ...)
    total = jax.jit(jax.grad(lambda p, x: nnx.merge(graph, p, rest, copy=True)(x, True).sum(), argnums=(0, 1)))
    gradient = total(parameters, x)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_variance_survives_a_large_mean_in_float32():
    z = jax.random.normal(jax.random.key(10), (1, 8, 6, 6, 4)) + 1000.0
    _, mean, variance = jax.jit(norm_relu_pool)(z, jnp.ones(4), jnp.zeros(4))
    exact = np.asarray(z, np.float64)
    np.testing.assert_allclose(mean[0], exact.mean((0, 1, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(variance[0], exact.var((0, 1, 2, 3)), rtol=1e-4)


def test_statistics_of_many_pixels_keep_float32_accuracy():
    z = jax.random.uniform(jax.random.key(16), (1, 85, 28, 28, 2)) + 1.0
    _, mean, variance = jax.jit(norm_relu_pool)(z, jnp.ones(2), jnp.zeros(2))
    exact = np.asarray(z, np.float64)
    np.testing.assert_allclose(mean[0], exact.mean((0, 1, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(variance[0], exact.var((0, 1, 2, 3)), rtol=5e-6)


@pytest.mark.parametrize("train", [True, False])
def test_block_in_both_modes_equals_plain_layers(train):
    block = random_block()
    block.norm.mean[...], block.norm.variance[...] = (
        jnp.asarray([0.1, -0.2, 0.3, 0.0]),
        jnp.asarray([0.5, 2.0, 1.0, 3.0]),
    )
    mean, variance = block.norm.mean[...], block.norm.variance[...]
    x = jax.random.normal(jax.random.key(11), (2, 3, 7, 6, 3))
    z = plain_conv(x.reshape(-1, 7, 6, 3), block.kernel[...]).reshape(2, 3, 7, 6, 4)
    if train:
        mean, variance = z.mean((1, 2, 3), keepdims=True), z.var((1, 2, 3), keepdims=True)
    normalised = (z - mean) / jnp.sqrt(variance + EPSILON) * block.norm.scale[...] + block.norm.shift[...]
    np.testing.assert_allclose(apply(block, x, train), max_pool(jax.nn.relu(normalised)), rtol=1e-4, atol=1e-5)


def test_running_statistics_are_means_over_tasks_with_the_sign_undone():
    block = random_block()
    x = jax.random.normal(jax.random.key(12), (2, 3, 6, 6, 3)) * jnp.asarray([1.0, 3.0])[:, None, None, None, None]
    z = plain_conv(x.reshape(-1, 6, 6, 3), block.kernel[...]).reshape(2, 3, 6, 6, 4)
    apply(block, x, True)
    np.testing.assert_allclose(block.norm.mean[...], 0.1 * z.mean((1, 2, 3)).mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(block.norm.variance[...], 0.9 + 0.1 * z.var((1, 2, 3)).mean(0), rtol=1e-5)


def test_task_batch_norm_standardises_each_task_and_learns_the_running_statistics():
    norm = TaskBatchNorm(5, affine=False)
    x = jax.random.normal(jax.random.key(13), (3, 20, 5)) * 2.0 + jnp.arange(3.0)[:, None, None]
    y = apply(norm, x, True)
    np.testing.assert_allclose(y.mean(1), jnp.zeros((3, 5)), atol=1e-5)
    np.testing.assert_allclose(y.var(1), jnp.ones((3, 5)), rtol=1e-4)
    assert nnx.state(norm, nnx.Param) == nnx.State({})
    norm.momentum = 0.0
    apply(norm, x, True)
    np.testing.assert_allclose(norm.mean[...], x.mean(1).mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.variance[...], x.var(1).mean(0), rtol=1e-4)


@pytest.mark.parametrize("module", [TaskBatchNorm(4), random_block(channels=4)])
def test_statistics_of_labelled_images_make_every_image_independent_of_the_others(module):
    x = jax.random.normal(jax.random.key(15), (2, 5, 6, 6, 4))
    recorded = jax.tree.map(jnp.copy, nnx.state(module, nnx.BatchStat))
    module.set_attributes(normalised_by=3)
    y, changed = apply(module, x, True), apply(module, x.at[:, 4].multiply(2.0), True)
    np.testing.assert_array_equal(changed[:, :4], y[:, :4])
    assert np.abs(changed[:, 4] - y[:, 4]).max() > 0.1
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(module, nnx.BatchStat), recorded))
    module.set_attributes(normalised_by=None)
    np.testing.assert_allclose(apply(module, x[:, :3], True), y[:, :3], atol=1e-5)


LONG = {"resnet12": pytest.mark.slow}  # seconds to compile; its block is compared with plain layers above


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in models.BACKBONES])
def test_tasks_do_not_mix_in_training_nor_images_in_evaluation(name):
    width = {} if name in ("identity", "metric") else {"width": 4}
    backbone = models.BACKBONES[name]((16, 17, 1), rngs=nnx.Rngs(0), **width)
    x = jax.random.uniform(jax.random.key(14), (2, 3, 16, 17, 1))
    train = nnx.jit(lambda backbone, x: backbone(x, True))
    features, changed = train(backbone, x), train(backbone, x.at[1].multiply(0.5))
    assert features.shape == (2, 3, backbone.features)
    np.testing.assert_array_equal(features[0], changed[0])
    evaluate = nnx.jit(lambda backbone, x: backbone(x, False))
    features, changed = evaluate(backbone, x), evaluate(backbone, x.at[:, 1:].multiply(0.5))
    np.testing.assert_array_equal(features[:, 0], changed[:, 0])


def test_conv4_feature_sizes_and_too_small_images():
    assert Conv4((28, 28, 1), rngs=nnx.Rngs(0)).features == 64
    assert Conv4((84, 84, 3), rngs=nnx.Rngs(0)).features == 1600
    with pytest.raises(ValueError, match="at least 16x16, got 12x28"):
        Conv4((12, 28, 1), rngs=nnx.Rngs(0))


def plain_maps(weights, x, train):
    """Conv4Maps of one task x [N, H, W, Ch] in plain layers: two unpadded blocks that pool, two padded that do not."""
    for i in range(4):
        block = weights[f"block{i}"]
        padding = "VALID" if i < 2 else "SAME"
        axes = ("NHWC", "HWIO", "NHWC")
        z = jax.lax.conv_general_dilated(x, block["kernel"], (1, 1), padding, dimension_numbers=axes)
        mean, variance = block["norm"]["mean"], block["norm"]["variance"]
        if train:
            mean, variance = z.mean((0, 1, 2)), z.var((0, 1, 2))
        z = block["norm"]["scale"] * (z - mean) / jnp.sqrt(variance + EPSILON) + block["norm"]["shift"]
        x = jax.nn.relu(z)
        x = max_pool(x[None])[0] if i < 2 else x
    return x


@pytest.mark.long
@pytest.mark.parametrize("train", [False, True])
def test_conv4_with_larger_maps_and_its_gradient_equal_plain_layers(train):
    with jax.enable_x64(True):
        network = Conv4Maps((13, 12, 2), rngs=nnx.Rngs(0), width=3)
        for i in range(4):
            norm = getattr(network, f"block{i}").norm
            norm.scale[...], norm.shift[...] = jnp.asarray([0.7, -1.3, 0.4]), jnp.asarray([0.3, 0.1, -0.5])
            norm.mean[...], norm.variance[...] = jnp.asarray([0.1, -0.2, 0.3]), jnp.asarray([0.5, 2.0, 1.5])
        x = jax.random.normal(jax.random.key(1), (1, 4, 13, 12, 2))
        graph, state = nnx.split(network)
        weights = jax.random.normal(jax.random.key(2), (4, 1, 1, 3))

        def mine(weights_of, x):
            held = nnx.replace_by_pure_dict(state, weights_of) or state
            return jnp.sum(weights * nnx.merge(graph, held, copy=True).maps(x, train)[0])

        def plain(weights_of, x):
            return jnp.sum(weights * plain_maps(weights_of, x[0], train))

        values = nnx.to_pure_dict(state)
        found, of_found = jax.jit(jax.value_and_grad(mine, argnums=1))(values, x)
        usual, of_usual = jax.jit(jax.value_and_grad(plain, argnums=1))(values, x)
        np.testing.assert_allclose(found, usual, rtol=1e-10)
        np.testing.assert_allclose(of_found, of_usual, rtol=1e-9, atol=1e-12)


def test_conv4_with_larger_maps_has_the_published_sizes():
    for shape, maps in (((28, 28, 1), (5, 5, 64)), ((84, 84, 3), (19, 19, 64))):
        network = Conv4Maps(shape, rngs=nnx.Rngs(0))
        assert jax.eval_shape(lambda x, of=network: of.maps(x, False), jnp.zeros((1, 1, *shape))).shape[2:] == maps
        assert network.features == np.prod(maps)
    with pytest.raises(ValueError, match=r"Conv4Maps expects images of at least 10x10, got 9x28"):
        Conv4Maps((9, 28, 1), rngs=nnx.Rngs(0))


def test_evaluation_leaves_the_running_statistics_alone():
    backbone = Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=4)
    before = nnx.to_pure_dict(nnx.state(backbone, nnx.BatchStat))
    apply(backbone, jnp.ones((1, 2, 16, 16, 1)), False)
    after = nnx.to_pure_dict(nnx.state(backbone, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_conv4_trains_in_float64_with_gradients_in_every_parameter():
    with jax.enable_x64(True):
        backbone = Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=4)
        graph, parameters, rest = nnx.split(backbone, nnx.Param, ...)
        x = jax.random.uniform(jax.random.key(15), (1, 4, 16, 16, 1))
        gradient = jax.jit(jax.grad(lambda p: (nnx.merge(graph, p, rest, copy=True)(x, True) ** 2).sum()))(parameters)
        for leaf in jax.tree.leaves(gradient):
            assert leaf.dtype == jnp.float64
            assert jnp.abs(leaf).max() > 0


def test_every_backbone_is_registered():
    assert defined(backbones.Backbone) == set(models.BACKBONES.values())


def test_relus_of_one_number_start_with_bends_everywhere():
    """Constants of `linear` are uniform within +- inputs^-1/2; at 0 all ReLUs of one number would bend at one place."""
    layer = linear(4, 20_000, rngs=nnx.Rngs(0))
    scaled = 2 * np.asarray(layer.bias[...])
    assert np.abs(scaled).max() <= 1 and abs(scaled.mean()) < 0.03 and scaled.std() == pytest.approx(3**-0.5, rel=0.02)
    hidden = MLP((1, 1, 1), rngs=nnx.Rngs(0)).hidden
    bends = -np.asarray(hidden.bias[...]) / np.asarray(hidden.kernel[...])[0]
    assert np.quantile(np.abs(bends), 0.75) > 0.3
