"""The ``megatron-qerl`` command: one file a sub-command, each with ``add_arguments(parser)`` and ``run(args)``."""
