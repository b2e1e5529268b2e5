"""Several processes that train one model together, on one machine or on many: who writes, and how they keep in step.

Every process runs the same program on the same data; the tasks of a step are shared between all of their devices. All
validate and test, so that each knows what the others know; the first alone prints and writes the run folder, which all
must be able to read when a run is resumed.
"""

import contextlib
import os
from collections.abc import Iterator

import jax
import numpy as np

from fewshot.training.configuration import RunConfig
from fewshot.training.overrides import ConfigError

AUTO = "auto"
_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


def connect(config: RunConfig) -> None:
    """Join the other processes, before anything touches a device; nothing where no coordinator is named.

    The flags default to the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; the coordinator
    `auto` leaves all three to Slurm or Open MPI. Raises ConfigError.
    """
    given = {name: getattr(config, name) for name in _VARIABLES}
    wanted = {name: os.environ.get(_VARIABLES[name]) if value is None else value for name, value in given.items()}
    coordinator = wanted.pop("coordinator")
    if coordinator is None:
        if any(value is not None for value in given.values()):
            raise ConfigError("--processes and --process-id need --coordinator HOST:PORT, the address of process 0")
        return
    if coordinator == AUTO:
        jax.distributed.initialize()
        return
    try:
        count, number = (int(str(value)) for value in wanted.values())
    except ValueError:
        count = number = -1
    if not 0 <= number < count or ":" not in coordinator:
        raise ConfigError(
            "expected --coordinator HOST:PORT with --processes K and --process-id 0 to K - 1, "
            f"got {coordinator} with {wanted['processes']} and {wanted['process_id']}"
        )
    jax.distributed.initialize(coordinator, count, number, cluster_detection_method="deactivate")


def is_first() -> bool:
    """This process writes and prints; true where there is only one."""
    return jax.process_index() == 0


@contextlib.contextmanager
def only_first_prints() -> Iterator[None]:
    """Standard output of all other processes goes nowhere."""
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def wait_for_all(what: str) -> None:
    """Go on once every process has come here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def largest(number: int) -> int:
    """The largest of the numbers that the processes bring; all must call it."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(number))))
