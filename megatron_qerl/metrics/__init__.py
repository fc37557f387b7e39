"""Numbers that a run records: their registry, the clock and memory readings behind some, and the sinks they go to."""
