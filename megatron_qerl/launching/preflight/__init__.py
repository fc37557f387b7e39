"""Checks of every node before a run starts on it: a bad one is named while it is cheap."""
