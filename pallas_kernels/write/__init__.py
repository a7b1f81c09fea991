"""The stages of the paged write kernels: tiles, rotation, encoding, staging and stores."""
