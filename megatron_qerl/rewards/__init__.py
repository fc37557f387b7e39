"""Verdicts on completions. Import the submodules: the verifier's process must not load more than it needs."""
