"""Building blocks of the XLA implementation."""
