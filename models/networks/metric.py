"""A metric on the features of a frozen encoder: what differs between pictures of one class counts less.

    (M1)  x' = sign(x) |x|^p,   z = x' / |x'| - m,   y = z + U diag(g) U^T z

A power p < 1 keeps a few large features of x [D], such as rectified ones have, from deciding everything. m [D] is the
mean of the class means of other classes, U [D, R] orthonormal directions, g [R] > -1 their gains. With U the leading
eigenvectors of a within-class covariance S of the unit vectors x' / |x'|, and eigenvalues l,

    (M2)  1 + g_r = sqrt(L_rest / L_r),   L_r = (1 - a) mean(l) + a l_r,   L_rest = (1 - a) mean(l) + a mean(l_r, r > R)

which whitens by S shrunk towards a multiple of the identity: a = 0 leaves z as it is.
"""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from fewshot.models.backbones import Backbone, check_power, powered
from fewshot.models.kernels import inner_products, unit_norm

RANK = 64


class FeatureMetric(Backbone):
    """(M1) on features in the place of images [.., 1, 1, D]; it starts with m = g = 0, in a random basis of rank R.

    Raises ValueError for a rank outside 0..D, and for a power that is not a positive number.
    """

    def __init__(self, image_shape: tuple[int, int, int], *, rngs: nnx.Rngs, rank: int = RANK, power: float = 1.0):
        self.image_shape, self.features, self.power = image_shape, math.prod(image_shape), power
        if not 0 <= rank <= self.features:
            raise ValueError(f"rank must lie in 0..{self.features}, the number of features, got {rank}")
        check_power(power)
        dtype = jnp.result_type(float)
        self.mean = nnx.Param(jnp.zeros(self.features, dtype))
        shape = self.features, rank
        basis = nnx.initializers.orthogonal()(rngs.params(), shape, dtype) if rank else jnp.zeros(shape, dtype)
        self.directions = nnx.Param(basis)
        self.gains = nnx.Param(jnp.zeros(rank, dtype))

    def __call__(self, x: Float[Array, "T N H W Ch"], train: bool) -> Float[Array, "T N D"]:
        """Images x [T, N, H, W, Ch] to features [T, N, D]."""
        tasks, points = x.shape[:2]
        z = unit_norm(powered(x.reshape(tasks * points, self.features), self.power)) - self.mean[...]
        basis = self.directions[...]
        y = z + inner_products(inner_products(z, basis.T) * self.gains[...], basis)
        return y.reshape(tasks, points, self.features)


def within_class_covariance(
    features: Float[np.ndarray, "N D"], labels: Integer[np.ndarray, " N"]
) -> Float[np.ndarray, "D D"]:
    """S of (M2): the covariance of unit features about the means of their classes, with divisor N - classes."""
    z = unit(features)
    classes, y = np.unique(labels, return_inverse=True)
    totals = np.zeros((len(classes), z.shape[1]))
    np.add.at(totals, y, z)
    z = z - (totals / np.bincount(y)[:, None])[y]
    return z.T @ z / (len(z) - len(classes))


def gains(values: Float[np.ndarray, " D"], rank: int, shrinkage: float) -> Float[np.ndarray, " R"]:
    """g of (M2) from all eigenvalues of S, the largest first; shrinkage is a."""
    base = (1 - shrinkage) * values.mean()
    rest = values[rank:].mean() if rank < len(values) else 0.0
    return np.sqrt((base + shrinkage * rest) / (base + shrinkage * values[:rank])) - 1


def unit(x: Float[np.ndarray, "*N D"]) -> Float[np.ndarray, "*N D"]:
    """x / |x| in double precision; a zero vector stays zero."""
    x = np.asarray(x, np.float64)
    return x / np.maximum(np.sqrt((x * x).sum(axis=-1, keepdims=True)), np.finfo(np.float64).tiny)
