"""Fully connected layers and learned scalars in the precision of this process."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

HIGHEST = jax.lax.Precision.HIGHEST


def linear(inputs: int, outputs: int, *, rngs: nnx.Rngs, bias: bool = True) -> nnx.Linear:
    """A linear map whose constants start uniformly within +- inputs^-1/2.

    The ReLUs of inputs of one number would all bend at 0 if they started at 0, and they hardly move from there: on
    sinusoids `cnp` ended at an NLL of 1.16 for -0.35.
    """
    reach = float(inputs) ** -0.5

    def start(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "..."]:
        return jax.random.uniform(key, shape, dtype, -reach, reach)

    dtype = jnp.result_type(float)
    return nnx.Linear(inputs, outputs, use_bias=bias, bias_init=start, param_dtype=dtype, precision=HIGHEST, rngs=rngs)


def scalars(starts: Mapping[str, float | Array]) -> nnx.Dict:
    """Parameters by name, of the type that training leaves them with: what was compiled for one is found for the other.

    A Python number would give them its weak type.
    """
    dtype = jnp.result_type(float)
    return nnx.Dict({name: nnx.Param(jnp.asarray(value, dtype)) for name, value in starts.items()})
