"""The tasks of a step shared between devices: a mesh with one axis of tasks, and the state whole on every device.

Each of k devices takes T / k of the T tasks through sampling, network and inference; gradients, running statistics and
the step's diagnostics are then combined over the axis. The loss is a mean over tasks, so these are the numbers of one
device but for the order of sums. The state does not know k: a checkpoint resumes on any number of devices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from numpyro.optim import _NumPyroOptim, optax_to_numpyro

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

    What comes back must be the same on every device: combine it with `total`.
    """
    if mesh is None:
        return function
    whole, part = PartitionSpec(), PartitionSpec(TASKS)
    # Without `check_vma` a gradient is that of the device's own tasks, which SharedOptimiser then combines, and loops
    # whose carry starts from constants need no annotation.
    return jax.shard_map(function, mesh=mesh, in_specs=(whole, part, part, whole), out_specs=whole, check_vma=False)


class SharedOptimiser(_NumPyroOptim):
    """An optax optimiser for SVI that combines what the devices of a mesh found before it takes its step.

    combine(loss, mutable state, gradients), each of a device's own tasks, returns those of all, the same on every
    device. The state is the optimiser's own.
    """

    def __init__(
        self, optimiser: optax.GradientTransformation, combine: Callable[[PyTree, PyTree, PyTree], PyTree]
    ) -> None:
        self.__dict__.update(optax_to_numpyro(optimiser).__dict__)
        self.combine = combine

    def eval_and_update(
        self, fn: Callable, state: PyTree, forward_mode_differentiation: bool = False
    ) -> tuple[tuple[PyTree, PyTree], PyTree]:
        """As numpyro.optim's, reverse mode only."""
        (loss, mutable_state), gradients = jax.value_and_grad(fn, has_aux=True)(self.get_params(state))
        loss, mutable_state, gradients = self.combine(loss, mutable_state, gradients)
        return (loss, mutable_state), self.update(gradients, state, value=loss)


def total(tree: PyTree) -> PyTree:
    """The sum of every leaf over the devices, as one array in one exchange.

    Between processes an exchange takes milliseconds, however little is sent; and two that do not depend on each other
    may start in another order on another device, where both then wait for good.
    """
    vector, restore = ravel_pytree(tree)
    return restore(jax.lax.psum(vector, TASKS))


def replicate(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Every array whole on every device of the mesh; all processes must pass the same numbers."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec())

    def spread(leaf: PyTree) -> jax.Array:
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
