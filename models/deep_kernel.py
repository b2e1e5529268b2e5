"""Deep kernel: a network, then a base kernel on its features. Parameters in, Gaussian prior out."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from flax import nnx
from jaxtyping import Array, Float, Shaped, UInt8

from fewshot.models.backbones import Backbone, TaskBatchNorm
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.kernels import Hyper, Kernel
from fewshot.models.layers import scalars
from fewshot.models.process import LatentProcess


def holds_features(shape: Sequence[int]) -> bool:
    """Whether images of a shape [..., H, W, Ch] are features of a user's own network, which have one pixel."""
    return tuple(shape[-3:-1]) == (1, 1)


def check_images(images: Shaped[Array | np.ndarray, "*N H W Ch"], what: str) -> None:
    """Raises ValueError unless the images are bytes or numbers in [0, 1], and features, of 1 x 1 pixels, are finite.

    A network does not show what is wrong with its images: maxima and rectifiers on CPU turn NaN into numbers.
    """
    if images.dtype == np.uint8 or not images.size:
        return
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"expected {what} as bytes or numbers in [0, 1], got {images.dtype}; convert them to uint8")
    values = np.asarray(images)  # NumPy's extremes are nan if any value is; XLA's on CPU are not
    low, high = float(values.min()), float(values.max())
    if holds_features(images.shape):
        if not np.isfinite([low, high]).all():
            raise ValueError(f"expected finite numbers as {what}, got values from {low} to {high}; remove the others")
    elif not (low >= 0 and high <= 1):  # written so that nan is refused
        advice = "divide them by 255" if high > 2 and low >= 0 else "remove NaN and rescale them"
        raise ValueError(f"expected {what} within [0, 1], got values from {low} to {high}; {advice}")


def starting_values(kernel: Kernel, mean: float | None) -> dict[str, float]:
    """Where the learning of a kernel's hyper-parameters, and of a prior mean, begins."""
    return {**kernel.initial(), **({} if mean is None else {"mean": mean})}


class DeepKernel(nnx.Module):
    """Backbone, optional batch norm of the features (if the kernel asks for it), kernel and its hyper-parameters.

    mean: where the learned constant prior mean starts; None for none, as for likelihoods of differences of logits.
    """

    def __init__(
        self,
        backbone: Backbone,
        kernel: Kernel,
        *,
        rngs: nnx.Rngs,
        classes: int | None = None,
        mean: float | None = None,
    ):
        self.backbone, self.kernel, self.classes, self.mean = backbone, kernel, classes, mean
        self.hyper = scalars(starting_values(kernel, mean))
        self.norm = TaskBatchNorm(backbone.features, affine=kernel.affine) if kernel.normalise_features else None

    def hyperparameters(self) -> Hyper:
        """Name -> unconstrained scalar: what the kernel takes, and the prior mean where it is learned."""
        return {name: self.hyper[name][...] for name in starting_values(self.kernel, self.mean)}

    def process(self, examples: float | Float[Array, ""] = 1.0) -> LatentProcess:
        """The latent process of a task with so many labelled examples a class, at the current hyper-parameters."""
        return LatentProcess(self.kernel, self.kernel.of_task(self.hyperparameters(), examples))

    def priors(self) -> dict[str, dist.Distribution]:
        """One weakly informative prior for each of `hyperparameters`."""
        mean = {} if self.mean is None else {"mean": dist.Normal(self.mean, 2.0)}
        return {**self.kernel.priors(), **mean}

    def __call__(
        self, x: UInt8[Array, "T N H W Ch"] | Float[Array, "T N H W Ch"], train: bool
    ) -> Float[Array, "T N D"]:
        """Features [T, N, D] of images x [T, N, H, W, Ch], bytes (scaled by 1/255) or numbers in [0, 1].

        train=True normalises with the statistics of each task's N images and records them. Raises ValueError for
        images of another shape than the backbone's.
        """
        expected = self.backbone.image_shape
        if x.shape[2:] != expected:
            raise ValueError(
                f"expected images of shape {expected}, got {x.shape[2:]}: resize them or rebuild the backbone"
            )
        x = x.astype(jnp.result_type(float)) / (255.0 if x.dtype == jnp.uint8 else 1.0)
        features = self.backbone(x, train)
        return features if self.norm is None else self.norm(features, train)

    def features(self, x: UInt8[Array, "N H W Ch"] | Float[Array, "N H W Ch"]) -> Float[Array, "N D"]:
        """Features [N, D] of images x [N, H, W, Ch] in evaluation mode: each row depends on its own image only."""
        return self(x[None], train=False)[0]

    def prior(
        self, x: UInt8[Array, "N H W Ch"] | Float[Array, "N H W Ch"], classes: int | None = None
    ) -> GaussianPrior:
        """Prior of the latents at labelled images x [N, H, W, Ch], in evaluation mode."""
        count = self.number_of(classes)
        return self.process(len(x) / count).prior(self.features(x), count)

    def query(
        self,
        x_support: UInt8[Array, "N H W Ch"] | Float[Array, "N H W Ch"],
        x_query: UInt8[Array, "Q H W Ch"] | Float[Array, "Q H W Ch"],
        classes: int | None = None,
    ) -> Query:
        """Query of (G7) from x_support [N, H, W, Ch] to x_query [Q, H, W, Ch], in evaluation mode."""
        support, query, count = self.features(x_support), self.features(x_query), self.number_of(classes)
        return self.process(len(x_support) / count).query(support, query, count)

    def number_of(self, classes: int | None) -> int:
        """The number of latents asked for, or the one given at construction. Raises ValueError without either."""
        chosen = self.classes if classes is None else classes
        if chosen is None:
            raise ValueError("expected the number of classes, got None: pass classes= here or to DeepKernel")
        return chosen
