"""Checks that a base kernel or a backbone keeps its promises, for authors of new ones.

    check_kernel(MyKernel())
    check_backbone(MyNetwork((28, 28, 1), rngs=nnx.Rngs(0)))

Each returns the names of the checks it made and raises ConformanceError at the first that fails, in seconds.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from fewshot.models.backbones import Backbone
from fewshot.models.gaussian.dense import positive_part
from fewshot.models.kernels import Hyper, Kernel

NEAR = 1e-5  # of differences
ROWS, TASKS, IMAGES = 20, 2, 3
ROUNDING = 1e-6  # in units of the largest number; square roots of distances that should be zero have eight digits


class ConformanceError(AssertionError):
    """A promise that is not kept; the message names it and says by how much."""


def passed(check: Callable[..., None], *arguments: object) -> str:
    """The name of a check that passes; whatever ends it otherwise is a ConformanceError with that name."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        check(*arguments)
    except ConformanceError:
        raise
    except Exception as error:  # of code that nobody has seen, which may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConformanceError(f"{name}: expected an answer, got {reason}") from error
    return name


def check_kernel(kernel: object) -> list[str]:
    """What learning, prediction and the samplers rely on: see the names that are returned.

    Raises ConformanceError, and TypeError for an object that is no kernel.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"expected a Kernel, got {type(kernel).__name__}; see models/kernels.py")
    checks = [_can_be_hashed, _has_a_prior_of_each_hyperparameter, _is_symmetric_and_positive, _has_its_diagonal]
    checks += [_has_its_root, _is_scaled, _knows_each_row_alone, _has_the_slope_of_its_values, _is_finite_everywhere]
    with jax.enable_x64(True):
        return [passed(check, kernel) for check in [*checks, _is_that_of_one_example]]


def check_backbone(backbone: object) -> list[str]:
    """What learners and evaluation rely on: see the names that are returned. The network may be trained or not.

    Its images are noise. Raises ConformanceError, and TypeError for an object that is no backbone.
    """
    if not isinstance(backbone, Backbone):
        raise TypeError(f"expected a Backbone, got {type(backbone).__name__}; see models/backbones.py")
    checks = [has_parameters_of_a_dtype, _has_its_features, _evaluates_each_image_alone, _evaluates_without_a_change]
    checks += [_trains_on_each_task_alone, _knows_no_order_of_images, _learns_every_parameter]
    return [passed(check, backbone) for check in checks]


def same(name: str, value: ArrayLike, expected: ArrayLike, tolerance: float) -> None:
    """Raises ConformanceError unless the numbers are the same up to the tolerance."""
    difference = float(np.abs(np.asarray(value, np.float64) - np.asarray(expected, np.float64)).max(initial=0.0))
    if not difference <= tolerance:  # written so that nan fails
        raise ConformanceError(f"{name}: expected a difference of at most {tolerance:.0e}, got {difference:.1e}")


# Kernels


def _hyper(kernel: Kernel) -> Hyper:
    """Hyper-parameters beside those that learning starts with."""
    return {name: jnp.asarray(value + 0.1) for name, value in kernel.initial().items()}


def _rows(seed: int, count: int) -> Float[Array, "N 6"]:
    return jnp.asarray(np.random.default_rng(seed).normal(0.3, 1.0, (count, 6)))


def _unusual_rows() -> Float[Array, "N 6"]:
    """Two that are equal, and one of zeros: all ReLUs of an image can be off."""
    x = _rows(0, ROWS)
    return x.at[1].set(x[0]).at[2].set(0.0)


@partial(jax.jit, static_argnums=0)
def _gram(kernel: Kernel, hyper: Hyper, x: Array, z: Array) -> Array:
    return kernel.gram(hyper, x, z)


def _can_be_hashed(kernel: Kernel) -> None:
    """Compiled programs are found again by it."""
    hash(kernel)


def _has_a_prior_of_each_hyperparameter(kernel: Kernel) -> None:
    initial, priors = kernel.initial(), kernel.priors()
    if initial.keys() != priors.keys() or "log_scale" not in initial:
        raise ConformanceError(
            f"hyper-parameters: expected log_scale among them and a prior of each of {', '.join(initial) or 'none'}, "
            f"got priors of {', '.join(priors) or 'none'}"
        )
    for name, prior in priors.items():
        if not (prior.support(initial[name]) and np.isfinite(prior.log_prob(initial[name]))):
            raise ConformanceError(f"the prior of {name}: expected a density where learning starts, {initial[name]}")


def _is_symmetric_and_positive(kernel: Kernel) -> None:
    x, z, hyper = _unusual_rows(), _rows(1, 4), _hyper(kernel)
    gram = _gram(kernel, hyper, x, x)
    if gram.shape != (ROWS, ROWS):
        raise ConformanceError(f"gram of {ROWS} rows: expected the shape {(ROWS, ROWS)}, got {gram.shape}")
    size = float(jnp.abs(gram).max())
    same("gram and its transpose", gram, gram.T, ROUNDING * size)
    there, back = _gram(kernel, hyper, x, z), _gram(kernel, hyper, z, x)
    same("gram(x, z) and the transpose of gram(z, x)", there, back.T, ROUNDING * size)
    if negative := int(positive_part(gram[None])[1]):
        raise ConformanceError(f"gram: expected no negative eigenvalue, got {negative} of {ROWS}")


def _has_its_diagonal(kernel: Kernel) -> None:
    x, hyper = _unusual_rows(), _hyper(kernel)
    gram = _gram(kernel, hyper, x, x)
    same("diagonal and that of gram", kernel.diagonal(hyper, x), jnp.diag(gram), ROUNDING * float(jnp.abs(gram).max()))


def _has_its_root(kernel: Kernel) -> None:
    x, hyper = _unusual_rows(), _hyper(kernel)
    root, gram = kernel.root(hyper, x), _gram(kernel, hyper, x, x)
    if root is not None:
        same("the square of root and gram", root @ root.T, gram, ROUNDING * float(jnp.abs(gram).max()))


def _is_scaled(kernel: Kernel) -> None:
    x, hyper = _unusual_rows(), _hyper(kernel)
    twice = _gram(kernel, {**hyper, "log_scale": hyper["log_scale"] + jnp.log(2.0)}, x, x)
    once = _gram(kernel, hyper, x, x)
    same("gram at twice the scale, and twice gram", twice, 2 * once, ROUNDING * float(jnp.abs(once).max()))


def _knows_each_row_alone(kernel: Kernel) -> None:
    x, z, hyper = _rows(2, 5), _rows(3, 4), _hyper(kernel)
    found = _gram(kernel, hyper, x, z)
    alone = _gram(kernel, hyper, x[:1], z[:1])
    same("gram of two rows among others and alone", found[:1, :1], alone, ROUNDING * float(jnp.abs(found).max()))


def _has_the_slope_of_its_values(kernel: Kernel) -> None:
    """By a finite difference in a random direction of all arguments."""
    weights = _rows(4, 5) @ _rows(5, 4).T  # [5, 4]

    def weighted(arguments: tuple[Hyper, Array, Array]) -> Array:
        return (weights * kernel.gram(*arguments)).sum()

    start, tree = ravel_pytree((_hyper(kernel), _rows(6, 5), _rows(7, 4)))
    direction = NEAR * jnp.asarray(np.random.default_rng(8).normal(size=start.shape))
    of = jax.jit(jax.value_and_grad(lambda at: weighted(tree(at))))
    value, slope = of(start)
    difference = (of(start + direction)[0] - of(start - direction)[0]) / 2
    size = abs(float(value)) + float(jnp.abs(slope) @ jnp.abs(direction)) / NEAR
    same("the derivative of gram and a difference", slope @ direction / NEAR, difference / NEAR, ROUNDING * size)


def _is_finite_everywhere(kernel: Kernel) -> None:
    """In single precision, values and derivatives, at equal rows and rows of zeros."""
    x = _unusual_rows().astype(jnp.float32)
    weights = (_rows(9, ROWS) @ _rows(10, ROWS).T).astype(jnp.float32)

    def weighted(hyper: Hyper, x: Array) -> Array:
        return (weights * kernel.gram(hyper, x, x)).sum() + kernel.diagonal(hyper, x).sum()

    hyper: Hyper = {name: jnp.asarray(value, jnp.float32) for name, value in _hyper(kernel).items()}
    value, slopes = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1)))(hyper, x)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, slopes))):
        raise ConformanceError("gram of equal rows and of zeros: expected finite values and derivatives, got others")
    if value.dtype != jnp.float32:
        raise ConformanceError(f"gram of single precision: expected its dtype to be kept, got {value.dtype}")


def _is_that_of_one_example(kernel: Kernel) -> None:
    x, hyper = _rows(11, 5), _hyper(kernel)
    found, expected = _gram(kernel, kernel.of_task(hyper, 1.0), x, x), _gram(kernel, hyper, x, x)
    same("gram of a task with one example a class", found, expected, ROUNDING * float(jnp.abs(expected).max()))


# Backbones


def weakly_typed(module: nnx.Module) -> list[str]:
    """Parameters whose type is that of a Python number; training gives them one, and every program is compiled anew."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(module))
    return [jax.tree_util.keystr(path) for path, leaf in leaves if getattr(leaf, "weak_type", False)]


def _noise(backbone: Backbone, seed: int) -> Float[Array, "T N H W Ch"]:
    shape = (TASKS, IMAGES, *backbone.image_shape)
    return jnp.asarray(np.random.default_rng(seed).uniform(size=shape), jnp.result_type(float))


def _features(backbone: Backbone, x: Array, train: bool) -> tuple[Array, nnx.State]:
    """Features, by a compiled program, and what else is in the network after them."""
    return _call(*nnx.split(backbone), x, train)


@partial(jax.jit, static_argnums=(0, 3))
def _call(graph: nnx.GraphDef, state: nnx.State, x: Array, train: bool) -> tuple[Array, nnx.State]:
    network = nnx.merge(graph, state, copy=True)
    return network(x, train), nnx.state(network)


def has_parameters_of_a_dtype(module: nnx.Module) -> None:
    """Raises ConformanceError for a parameter of a Python number's type."""
    if weak := weakly_typed(module):
        raise ConformanceError(
            f"parameters: expected arrays of a dtype, got a Python number at {weak[0]}; make it by jnp.asarray"
        )


def _has_its_features(backbone: Backbone) -> None:
    for train in (True, False):
        found = _features(backbone, _noise(backbone, 0), train)[0]
        expected = (TASKS, IMAGES, backbone.features)
        if found.shape != expected:
            raise ConformanceError(f"features of {TASKS} x {IMAGES} images: expected {expected}, got {found.shape}")
        if not np.isfinite(found).all():
            raise ConformanceError("features of noise: expected finite numbers, got others")


def _evaluates_each_image_alone(backbone: Backbone) -> None:
    x = _noise(backbone, 1)
    found, changed = (_features(backbone, each, False)[0] for each in (x, x.at[:, 1:].multiply(0.5)))
    same("features of an image among other images in evaluation", changed[:, 0], found[:, 0], _near(found))


def _evaluates_without_a_change(backbone: Backbone) -> None:
    before, after = nnx.state(backbone), _features(backbone, _noise(backbone, 2), False)[1]
    for one, other in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        if not jnp.array_equal(one, other):
            raise ConformanceError("what the network holds: expected no change by an evaluation, got one")


def _trains_on_each_task_alone(backbone: Backbone) -> None:
    x = _noise(backbone, 3)
    found, changed = (_features(backbone, each, True)[0] for each in (x, x.at[1].multiply(0.5)))
    same("features of a task beside another task in training", changed[0], found[0], _near(found))


def _knows_no_order_of_images(backbone: Backbone) -> None:
    x = _noise(backbone, 4)
    found, turned = (_features(backbone, each, True)[0] for each in (x, x[:, ::-1]))
    same("features of images in another order, put back", turned[:, ::-1], found, _near(found))


def _near(features: Array) -> float:
    return 1e-4 * max(1.0, float(jnp.abs(features).max()))


def moved_at_random(parameters: nnx.State) -> nnx.State:
    """Parameters beside given ones."""
    rng = np.random.default_rng(6)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(0.01 * rng.normal(size=leaf.shape), leaf.dtype), parameters)


def check_every_gradient(gradient: nnx.State) -> None:
    """Raises ConformanceError for a parameter whose gradient is zero or no number."""
    for path, slope in jax.tree_util.tree_leaves_with_path(gradient):
        if not (np.isfinite(slope).all() and jnp.abs(slope).max() > 0):
            got = "zeros alone" if np.isfinite(slope).all() else "numbers that are not finite"
            raise ConformanceError(f"the gradient in {jax.tree_util.keystr(path)}: expected one, got {got}")


def _learns_every_parameter(backbone: Backbone) -> None:
    """Beside where they are: the first gradient of one that starts at zero may be zero."""
    graph, parameters, *others = nnx.split(backbone, nnx.Param, ...)
    x = _noise(backbone, 5)
    weights = jnp.asarray(np.random.default_rng(7).normal(size=(TASKS, IMAGES, backbone.features)), x.dtype)

    def weighted(parameters: nnx.State) -> Array:
        return (weights * nnx.merge(graph, parameters, *others, copy=True)(x, True)).sum()

    check_every_gradient(jax.jit(jax.grad(weighted))(moved_at_random(parameters)))
