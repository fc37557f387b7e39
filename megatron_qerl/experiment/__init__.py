"""Experiments: several arms, several seeds, one table. Each run is an ordinary run folder made by ``train``."""
