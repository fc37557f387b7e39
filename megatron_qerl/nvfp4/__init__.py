"""NVFP4 checkpoints: the format's arithmetic, reading, writing, quantising and verifying them."""
