"""Networks on the labelled points of a task, which have no order and may be padded: layers, means, attention.

Letters: N points, of which some are real, Q queries, D numbers of an input, R of a representation.
"""

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from fewshot.models.layers import HIGHEST, linear

Real = Bool[Array, " N"]


class Layers(nnx.Module):
    """Fully connected layers of these sizes, ReLU between them; the last one is linear."""

    def __init__(self, sizes: Sequence[int], *, rngs: nnx.Rngs):
        each = [linear(inputs, outputs, rngs=rngs) for inputs, outputs in pairwise(sizes)]
        self.layers = nnx.List(each)

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N R"]:
        """Of every row by itself."""
        for number, layer in enumerate(self.layers):
            x = layer(x if number == 0 else jax.nn.relu(x))
        return x


def mean_of(values: Float[Array, "N R"], real: Real) -> Float[Array, " R"]:
    """The mean of the real rows, 0 where there are none."""
    return jnp.sum(jnp.where(real[:, None], values, 0.0), axis=0) / jnp.maximum(jnp.sum(real), 1)


def attend(
    query: Float[Array, "Q D"], keys: Float[Array, "N D"], values: Float[Array, "N R"], real: Real
) -> Float[Array, "Q R"]:
    """sum_n a_qn values_n, a_q = softmax of q^T k_n / D^1/2 over the real points; 0 where there are none."""
    scores = jnp.matmul(query, keys.T, precision=HIGHEST) / jnp.sqrt(float(keys.shape[1]))
    scores = jnp.where(real, scores, -jnp.inf)
    # The initial value is what a row without real points has in the place of its largest score.
    largest = jnp.max(scores, axis=1, keepdims=True, initial=jnp.finfo(scores.dtype).min)
    weights = jnp.exp(scores - jax.lax.stop_gradient(largest))
    total = jnp.sum(weights, axis=1, keepdims=True)
    found = jnp.matmul(weights, jnp.where(real[:, None], values, 0.0), precision=HIGHEST)
    return found / jnp.where(total > 0, total, 1.0)


class Attention(nnx.Module):
    """O concat_h attend(W_h query, K_h keys, V_h values), all maps linear without a constant (Vaswani et al. 2017).

    inputs: numbers of a query and of a key; width: numbers of a value. Raises ValueError unless heads divide width.
    """

    def __init__(self, inputs: int, width: int, heads: int, *, rngs: nnx.Rngs):
        if heads < 1 or width % heads:
            raise ValueError(f"expected a number of heads that divides the width {width}, got {heads}")
        self.heads = heads
        self.query, self.key = (linear(inputs, width, rngs=rngs, bias=False) for _ in range(2))
        self.value, self.output = (linear(width, width, rngs=rngs, bias=False) for _ in range(2))

    def __call__(
        self, query: Float[Array, "Q D"], keys: Float[Array, "N D"], values: Float[Array, "N R"], real: Real
    ) -> Float[Array, "Q R"]:
        """What every query takes from the real points."""
        told, at, held = (self._of_heads(each) for each in (self.query(query), self.key(keys), self.value(values)))
        found = jax.vmap(attend, in_axes=(0, 0, 0, None))(told, at, held, real)
        return self.output(jnp.moveaxis(found, 0, 1).reshape(len(query), -1))

    def _of_heads(self, rows: Float[Array, "N R"]) -> Float[Array, "H N r"]:
        return jnp.moveaxis(rows.reshape(len(rows), self.heads, rows.shape[1] // self.heads), 1, 0)


class PointEncoder(nnx.Module):
    """h(x_n, y_n) of every point, then `rounds` of self-attention: r_n <- r_n + attention of r_n to all r."""

    def __init__(self, inputs: int, width: int, *, rounds: int = 0, heads: int = 1, rngs: nnx.Rngs):
        self.layers = Layers((inputs + 1, width, width, width), rngs=rngs)
        self.rounds = nnx.List([Attention(width, width, heads, rngs=rngs) for _ in range(rounds)])

    def __call__(self, x: Float[Array, "N D"], y: Float[Array, " N"], real: Real) -> Float[Array, "N R"]:
        """Representations; those of points that are not real are of no use, and change none of the others."""
        found = self.layers(jnp.concatenate([x, y[:, None].astype(x.dtype)], axis=1))
        for attention in self.rounds:
            found = found + attention(found, found, found, real)
        return found
