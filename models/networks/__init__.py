"""Networks that come trained: encoders of photographs, which stay as they are."""
