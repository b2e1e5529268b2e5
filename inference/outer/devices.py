"""The tasks of a step shared between devices: a mesh with one axis of tasks, and the state whole on every device.

Each of k devices takes T / k of the T tasks through sampling, network and inference; gradients, running statistics and
the step's diagnostics are then averaged over the axis. The loss is a mean over tasks, so these are the numbers of one
device but for the order of sums. The state does not know k: a checkpoint resumes on any number of devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TASKS = "tasks"  # the mesh axis


def task_mesh(tasks_per_step: int) -> Mesh | None:
    """The mesh of all devices that JAX sees, in all processes; None where there is only one.

    Raises ValueError unless the number of devices divides the tasks of a step.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return None
    if tasks_per_step % len(devices):
        more = -(-tasks_per_step // len(devices)) * len(devices)
        fewer = [count for count in range(1, len(devices)) if tasks_per_step % count == 0]
        raise ValueError(
            f"expected tasks per step to be a multiple of the {len(devices)} devices, got {tasks_per_step}; "
            f"try {more}, or make only {' or '.join(map(str, fewer))} visible (CUDA_VISIBLE_DEVICES)"
        )
    return Mesh(np.array(devices), (TASKS,))


def over_tasks(mesh: Mesh | None, function: Callable) -> Callable:
    """function(state, data keys [T], loop keys [T], sampler) -> state, each device with its part of the keys.

    What comes back must be the same on every device: combine it with `average` and the like.
    """
    if mesh is None:
        return function
    whole, part = PartitionSpec(), PartitionSpec(TASKS)
    # Without `check_vma` a gradient is that of the device's own tasks, which `averaging` then combines, and loops
    # whose carry starts from constants need no annotation.
    return jax.shard_map(function, mesh=mesh, in_specs=(whole, part, part, whole), out_specs=whole, check_vma=False)


def averaging(mesh: Mesh | None, optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimiser on gradients averaged over the devices; its state is the same as without."""
    if mesh is None:
        return optimiser
    inner = optax.with_extra_args_support(optimiser)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        gradients, extra = jax.lax.pmean((gradients, extra), TASKS)
        return inner.update(gradients, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def after(event: jax.Array, tree: Any) -> Any:
    """The tree, its floats not available before `event` is: XLA's CPU compiler drops optimisation barriers."""
    bounded = jnp.where(jnp.abs(event) <= 1, event, 0)  # 0 for NaN too
    return jax.tree.map(lambda leaf: leaf + (0 * bounded).astype(leaf.dtype), tree)


def replicate(mesh: Mesh | None, tree: Any) -> Any:
    """Every array whole on every device of the mesh; all processes must pass the same numbers."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec())

    def spread(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(spread(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        return place(np.asarray(leaf), sharding)

    return jax.tree.map(spread, tree)


def place(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A copy on the devices of a placement, each process filling its own; on one device it is left uncommitted."""
    if len(sharding.device_set) == 1:
        return jnp.array(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def own(array: jax.Array) -> jax.Array:
    """A replicated array as this process's first device holds it, for work that is not shared."""
    return array if len(array.sharding.device_set) == 1 else array.addressable_data(0)
