"""Networks that come trained: encoders of photographs, which stay as they are."""

from models.networks.encoders import ENCODERS, Encoder, load_encoder
from models.networks.pictures import EncoderError

__all__ = ["ENCODERS", "Encoder", "EncoderError", "load_encoder"]
