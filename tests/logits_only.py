"""The least that counts as a model."""

from flax import nnx


class LogitsOnly(nnx.Module):
    """A model with nothing but a call."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, tokens, cache, plan):
        return self.inner(tokens, cache, plan)
