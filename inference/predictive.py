"""Class probabilities at new inputs: one path for every inference kernel (G7, then the likelihood)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from models.gaussian import Query
from models.likelihoods.base import Likelihood


def predict(
    key: Key[Array, ""],
    likelihood: Likelihood,
    posterior: Any,
    query: Query,
    classes: Bool[Array, " C"] | None = None,
) -> Float[Array, "Q C"]:
    """p(y_* = k | data) = E_q p(k | f_*) for every query; the draws are shared, so no query depends on another."""
    return likelihood.predict(key, posterior.predict(query), classes)


def temper(probabilities: Float[Array, "*rest C"], temperature: float | Float[Array, ""]) -> Float[Array, "*rest C"]:
    """Probabilities raised to 1 / temperature and normalised: above 1 less confident, below 1 more; ranks stay."""
    tiny = jnp.finfo(probabilities.dtype).tiny
    return jax.nn.softmax(jnp.log(jnp.maximum(probabilities, tiny)) / temperature, axis=-1)
