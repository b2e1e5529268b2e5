"""Full context embeddings (Vinyals et al. 2016, appendix A): features that depend on all labelled images of a task.

    (F1)  g(x_n) = x_n + forward_n + backward_n,     states of two LSTMs that read the labelled features in an order
    (F2)  h_k = x + LSTM([x, r_k], h_{k-1}),  r_k = sum_n softmax_n(h_{k-1} . g(x_n)) g(x_n),  h_0 = x,  k = 1..K

Labels enter neither, and every query has its own h. Letters: N labelled images, Q queries, D features, S = D states.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from fewshot.models.layers import HIGHEST, linear

READS = 5  # K of (F2): as many as labelled images of a 5-way 1-shot task, as Chen et al. 2019 have it there


class LSTM(nnx.Module):
    """A long short-term memory: gates i, f, o by sigmoid, g by tanh; c <- f c + i g, h = o tanh(c)."""

    def __init__(self, inputs: int, size: int, *, rngs: nnx.Rngs):
        self.size = size
        self.gates = linear(inputs + size, 4 * size, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*B I"], hidden: Float[Array, "*B S"], cell: Float[Array, "*B S"]
    ) -> tuple[Float[Array, "*B S"], Float[Array, "*B S"]]:
        """(h, c) after one input."""
        i, f, o, g = jnp.split(self.gates(jnp.concatenate([x, hidden], axis=-1)), 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell), cell

    def states(self, x: Float[Array, "N I"], real: Bool[Array, " N"]) -> Float[Array, "N S"]:
        """h after each of a sequence of inputs; what is not real is not read."""

        def read(carry: tuple[Array, Array], entry: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            found = self(entry[0], *carry)
            kept = jax.tree.map(lambda new, old: jnp.where(entry[1], new, old), found, carry)
            return kept, kept[0]

        blank = jnp.zeros(self.size, x.dtype)
        return jax.lax.scan(read, (blank, blank), (x, real))[1]


class FullContext(nnx.Module):
    """(F1) and (F2). The labelled features are read in the order of their sums, so that theirs does not matter."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.forward, self.backward = LSTM(features, features, rngs=rngs), LSTM(features, features, rngs=rngs)
        self.attending = LSTM(2 * features, features, rngs=rngs)

    def labelled(self, x: Float[Array, "N D"], real: Bool[Array, " N"]) -> Float[Array, "N D"]:
        """(F1) of labelled features."""
        order = jnp.argsort(jnp.where(real, jax.lax.stop_gradient(x).sum(1), jnp.inf))
        row, kept = x[order], real[order]
        seen = self.forward.states(row, kept) + self.backward.states(row[::-1], kept[::-1])[::-1]
        return x + seen[jnp.argsort(order)]

    def query(
        self, x: Float[Array, "Q D"], labelled: Float[Array, "N D"], real: Bool[Array, " N"]
    ) -> Float[Array, "Q D"]:
        """(F2), h_K, of queries; labelled is what (F1) made of the others."""

        def read(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            hidden, cell = carry
            scores = jnp.where(real, jnp.matmul(hidden, labelled.T, precision=HIGHEST), -jnp.inf)
            found = jnp.matmul(jax.nn.softmax(scores), jnp.where(real[:, None], labelled, 0.0), precision=HIGHEST)
            hidden, cell = self.attending(jnp.concatenate([x, found], axis=1), hidden, cell)
            return (x + hidden, cell), None

        return jax.lax.scan(read, (x, jnp.zeros_like(x)), None, length=READS)[0][0]
