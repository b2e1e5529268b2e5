"""Encoders that run in ONNX Runtime or PyTorch: networks of others, by file or by name."""

import hashlib
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from fewshot.models.networks.pictures import EncoderError, FrozenEncoder, Preparation, missing_extra

Colours = tuple[float, float, float]
# Of ImageNet's photographs, for pixels from 0 to 1: what most published networks were trained with.
IMAGENET_MEAN: Colours = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION: Colours = (0.229, 0.224, 0.225)
CROP = 0.875  # of the short side, where nothing else is known: 224 of 256
CHUNK = 16


def onnx_file(
    path: str | Path,
    *,
    mean: Colours = IMAGENET_MEAN,
    deviation: Colours = IMAGENET_DEVIATION,
    side: int | None = None,
    crop: float = CROP,
    output: str | None = None,
) -> FrozenEncoder:
    """A network in an ONNX file with all its weights: pictures [N, 3, H, W] or [N, H, W, 3] in, features [N, D] out.

    mean, deviation: pixels enter as (pixel / 255 - mean) / deviation. side: of the images, where the file leaves it
    open. crop: the part of the picture's short side that is kept. output: the name of the features, the first output
    if None.

    Raises:
        EncoderError: the extra `onnx` is not installed, or the file cannot be read or has other inputs or outputs.
    """
    if not 0 < crop <= 1:
        raise EncoderError(f"expected crop in (0, 1], got {crop}; 0.875 keeps 224 of 256 pixels")
    runtime = _package("onnxruntime", "ONNX Runtime", "onnx")
    try:
        content = Path(path).expanduser().read_bytes()
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own errors have no common base but this
        reason = " ".join(str(error).split())[:160]
        raise EncoderError(f"expected a network in the ONNX file {path}, got {reason}; export it again") from error
    first, batch, length = _input(session, path, side)
    preparation = Preparation(length, round(length / crop), _bytes(mean), _bytes(deviation))
    chosen = _output(session, path, output)
    channels_first = first.shape[1] == 3

    def apply(pixels: np.ndarray) -> np.ndarray:
        x = _normalised(pixels, preparation)
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if channels_first else x
        result = np.asarray(session.run([chosen], {first.name: x})[0])
        return result.reshape(len(result), -1) if result.ndim == 4 and result.shape[2:] == (1, 1) else result

    identity = f"onnx-{hashlib.sha256(content).hexdigest()[:16]}-{chosen}-{preparation.describe()}"
    return FrozenEncoder(f"onnx:{path}", preparation, _width(apply, batch, length, path), identity, apply, batch)


def _package(name: str, what: str, extra: str) -> Any:
    """A package that only an extra installs. Raises EncoderError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_extra(what, extra) from error


def _bytes(values: Colours) -> Colours:
    red, green, blue = (255.0 * value for value in values)
    return red, green, blue


def _normalised(pixels: np.ndarray, preparation: Preparation) -> np.ndarray:
    mean, deviation = np.asarray(preparation.mean, np.float32), np.asarray(preparation.deviation, np.float32)
    return (pixels.astype(np.float32) - mean) / deviation


def _input(session: Any, path: str | Path, side: int | None) -> tuple[Any, int, int]:
    """The network's input, how many pictures it takes at a time, and their side."""
    inputs = session.get_inputs()
    shape = inputs[0].shape if len(inputs) == 1 else []
    if len(shape) != 4 or 3 not in (shape[1], shape[3]) or inputs[0].type != "tensor(float)":
        got = ", ".join(f"{one.type} {one.shape}" for one in inputs)
        raise EncoderError(f"expected one float32 input [N, 3, H, W] or [N, H, W, 3] in {path}, got {got}")
    sides = shape[2:] if shape[1] == 3 else shape[1:3]
    known = {one for one in sides if isinstance(one, int)} | ({side} if side else set())
    if len(known) != 1:
        raise EncoderError(f"expected one side of square images for {path}, got {sides} and side={side}; choose side")
    return inputs[0], shape[0] if isinstance(shape[0], int) else CHUNK, known.pop()


def _output(session: Any, path: str | Path, output: str | None) -> str:
    names = [one.name for one in session.get_outputs()]
    if output is not None and output not in names:
        raise EncoderError(f"expected an output named {', '.join(names)} of {path}, got {output!r}")
    return output or names[0]


def _width(apply: Any, batch: int, side: int, path: str | Path) -> int:
    """The number of features, by trying: a file may leave it open."""
    try:
        shape = apply(np.zeros((batch, side, side, 3), np.uint8)).shape
    except Exception as error:  # as above
        reason = " ".join(str(error).split())[:160]
        raise EncoderError(f"expected {path} to take images of {side} pixels, got {reason}") from error
    if len(shape) != 2 or shape[0] != batch:
        raise EncoderError(f"expected features [{batch}, D] from {path}, got {shape}; name another output")
    return int(shape[1])


def timm_model(name: str, *, pretrained: bool = True) -> FrozenEncoder:
    """A network of timm (PyTorch Image Models) without its classifier, with its own size, crop and normalisation.

    timm fetches pretrained weights, or finds them on this machine. pretrained=False is for tests.

    Raises:
        EncoderError: the extra `timm` is not installed, there is no such network, or its weights cannot be had.
    """
    torch, timm = (_package(name, "timm and PyTorch", "timm") for name in ("torch", "timm"))
    try:
        network = timm.create_model(name, pretrained=pretrained, num_classes=0).eval()
    except Exception as error:  # of the hub, the network or the name: timm has no class of its own for them
        reason = " ".join(str(error).split())[:160]
        raise EncoderError(f"expected timm to load {name!r}, got {reason}; see timm.list_models()") from error
    config = timm.data.resolve_model_data_config(network)
    side = config["input_size"][-1]
    short = round(side / config["crop_pct"])
    preparation = Preparation(side, short, _bytes(config["mean"]), _bytes(config["std"]))

    def apply(pixels: np.ndarray) -> np.ndarray:
        x = torch.from_numpy(np.ascontiguousarray(_normalised(pixels, preparation).transpose(0, 3, 1, 2)))
        with torch.inference_mode():
            return network(x).numpy()

    digest = hashlib.sha256()
    for key, tensor in network.state_dict().items():
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    identity = f"timm-{name}-{digest.hexdigest()[:16]}-{preparation.describe()}"
    return FrozenEncoder(f"timm:{name}", preparation, int(network.num_features), identity, apply, CHUNK)
