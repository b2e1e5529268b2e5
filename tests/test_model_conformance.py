"""check_kernel and check_backbone: what is registered passes, and what has one error is told which."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest
from flax import nnx

from fewshot import ConformanceError, check_backbone, check_kernel
from fewshot.models import BACKBONES, KERNELS, MLP, RBF
from fewshot.models.kernels import Linear, inner_products, per_dimension

# A second or more to compile, and minutes without a cache.
MARKS = {"conv4": pytest.mark.long, "conv4-maps": pytest.mark.long, "resnet12": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "rbf" else pytest.mark.long) for name in KERNELS]
)
def test_every_kernel_keeps_its_promises(name):
    checked = check_kernel(KERNELS[name]())
    assert len(checked) == 10 and "is symmetric and positive" in checked


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in BACKBONES])
def test_every_backbone_keeps_its_promises(name):
    width = {} if name in ("identity", "metric") else {"width": 4}
    checked = check_backbone(BACKBONES[name]((16, 17, 1), rngs=nnx.Rngs(0), **width))
    assert len(checked) == 7 and "evaluates each image alone" in checked


class Unhashable(RBF):
    __hash__ = None


@dataclass(frozen=True)
class Nameless(RBF):
    def priors(self):
        return {"log_scale": super().priors()["log_scale"]}


@dataclass(frozen=True)
class Elsewhere(RBF):
    def priors(self):
        return {**super().priors(), "log_lengthscale": dist.HalfNormal(1.0)}


@dataclass(frozen=True)
class Lopsided(RBF):
    def gram(self, hyper, x, z):
        return super().gram(hyper, x, z) * (1 + 0.01 * x[:, :1])


@dataclass(frozen=True)
class Sideways(RBF):
    """Symmetric among the same rows, not between others."""

    def gram(self, hyper, x, z):
        found = super().gram(hyper, x, z)
        return found if x.shape == z.shape else found * (1 + 0.01 * x[:, :1])


@dataclass(frozen=True)
class Negative(RBF):
    def gram(self, hyper, x, z):
        return super().gram(hyper, x, z) - 2 * jnp.exp(hyper["log_scale"])


@dataclass(frozen=True)
class Long(RBF):
    def gram(self, hyper, x, z):
        return super().gram(hyper, x, z)[:, :-1]


@dataclass(frozen=True)
class Thick(RBF):
    def diagonal(self, hyper, x):
        return 1.01 * super().diagonal(hyper, x)


@dataclass(frozen=True)
class Crooked(Linear):
    def root(self, hyper, x):
        return 1.01 * super().root(hyper, x)


@dataclass(frozen=True)
class Unscaled(RBF):
    def gram(self, hyper, x, z):
        return super().gram({**hyper, "log_scale": 0.0}, x, z)

    def diagonal(self, hyper, x):
        return super().diagonal({**hyper, "log_scale": 0.0}, x)


@dataclass(frozen=True)
class Centred(Linear):
    def feature_map(self, hyper, x):
        return super().feature_map(hyper, x - x.mean(0))

    def gram(self, hyper, x, z):
        centre = 0.5 * (x.mean(0) + z.mean(0))
        return jnp.exp(hyper["log_scale"]) * inner_products(per_dimension(x - centre), per_dimension(z - centre))


@dataclass(frozen=True)
class Stopped(RBF):
    def gram(self, hyper, x, z):
        return super().gram({**hyper, "log_lengthscale": jax.lax.stop_gradient(hyper["log_lengthscale"])}, x, z)


@dataclass(frozen=True)
class Rooted(RBF):
    """exp(-r): the square root of a distance of zero has no derivative."""

    def profile(self, squares):
        return jnp.exp(-jnp.sqrt(squares))


@dataclass(frozen=True)
class Promoted(RBF):
    def gram(self, hyper, x, z):
        return super().gram(hyper, x.astype(jnp.float64), z.astype(jnp.float64))


@dataclass(frozen=True)
class Raising(RBF):
    def gram(self, hyper, x, z):
        raise KeyError("log_period")


@dataclass(frozen=True)
class Tasked(RBF):
    def of_task(self, hyper, examples):
        return {**hyper, "log_scale": hyper["log_scale"] + examples}


KERNELS_WITH_ONE_ERROR = {
    Unhashable: "can be hashed: expected an answer, got TypeError",
    Nameless: "among them and a prior of each of log_scale, log_lengthscale, got priors of log_scale$",
    Elsewhere: "the prior of log_lengthscale: expected a density where learning starts, -0.25",
    Lopsided: "gram and its transpose: expected a difference of at most",
    Sideways: r"gram\(x, z\) and the transpose of gram\(z, x\)",
    Negative: "gram: expected no negative eigenvalue, got [0-9]+ of 20",
    Long: r"gram of 20 rows: expected the shape \(20, 20\), got \(20, 19\)",
    Thick: "diagonal and that of gram",
    Crooked: "the square of root and gram",
    Unscaled: "gram at twice the scale, and twice gram",
    Centred: "gram of two rows among others and alone",
    Stopped: "the derivative of gram and a difference",
    Rooted: "expected finite values and derivatives, got others",
    Promoted: "gram of single precision: expected its dtype to be kept, got float64",
    Raising: "is symmetric and positive: expected an answer, got KeyError: 'log_period'",
    Tasked: "gram of a task with one example a class",
}


class Whole(MLP):
    """A network without errors, for those below."""

    def __init__(self):
        super().__init__((4, 4, 1), rngs=nnx.Rngs(0), width=5)


class Weak(Whole):
    def __init__(self):
        super().__init__()
        self.factor = nnx.Param(jnp.asarray(2.0))


class Narrow(Whole):
    def __call__(self, x, train):
        return super().__call__(x, train)[..., :-1]


class Infinite(Whole):
    def __call__(self, x, train):
        return super().__call__(x, train) / 0.0


class Together(Whole):
    def __call__(self, x, train):
        found = super().__call__(x, train)
        return found - found.mean(1, keepdims=True)


class Counting(Whole):
    def __init__(self):
        super().__init__()
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.float32))

    def __call__(self, x, train):
        self.calls[...] = self.calls[...] + 1
        return super().__call__(x, train)


class Mixed(Whole):
    def __call__(self, x, train):
        found = super().__call__(x, train)
        return found - found.mean(0) if train else found


class Ordered(Whole):
    def __call__(self, x, train):
        return super().__call__(x, train) + jnp.arange(x.shape[1])[:, None] * (1.0 if train else 0.0)


class Dead(Whole):
    def __init__(self):
        super().__init__()
        self.unused = nnx.Param(jnp.ones(3, jnp.float32))


class Steep(Whole):
    def __call__(self, x, train):
        return super().__call__(x, train) + jnp.sqrt(0.0 * super().__call__(x, train) ** 2)


BACKBONES_WITH_ONE_ERROR = {
    Weak: "parameters: expected arrays of a dtype, got a Python number at .*factor",
    Narrow: r"features of 2 x 3 images: expected \(2, 3, 5\), got \(2, 3, 4\)",
    Infinite: "features of noise: expected finite numbers, got others",
    Together: "features of an image among other images in evaluation",
    Counting: "what the network holds: expected no change by an evaluation, got one",
    Mixed: "features of a task beside another task in training",
    Ordered: "features of images in another order, put back",
    Dead: "the gradient in .*unused.*: expected one, got zeros alone",
    Steep: "the gradient in .*: expected one, got numbers that are not finite",
}


ERRORS = [
    pytest.param(check, broken, reason, id=broken.__name__)
    for check, every in ((check_kernel, KERNELS_WITH_ONE_ERROR), (check_backbone, BACKBONES_WITH_ONE_ERROR))
    for broken, reason in every.items()
]


@pytest.mark.parametrize("check, broken, reason", ERRORS)
def test_an_error_is_named(check, broken, reason):
    with pytest.raises(ConformanceError, match=reason) as error:
        check(broken())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("check, kind", [(check_kernel, "Kernel"), (check_backbone, "Backbone")])
def test_something_else_is_refused(check, kind):
    with pytest.raises(TypeError, match=f"expected a {kind}, got dict; see models/"):
        check({})
