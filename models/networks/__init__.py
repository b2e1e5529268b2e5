"""Networks that come trained: encoders of photographs, which stay as they are."""

from fewshot.models.networks.encoders import ENCODERS, Encoder, load_encoder
from fewshot.models.networks.pictures import EncoderError

__all__ = ["ENCODERS", "Encoder", "EncoderError", "load_encoder"]
