"""From a run config and a cluster config to scripts that Slurm or plain hosts run."""
