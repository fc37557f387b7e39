#!/usr/bin/env bash
# Debian's Slurm and munge, for the virtual cluster of tests/slurm. Nothing is started. Needs root.
set -euo pipefail

for program in slurmctld slurmd sbatch munged; do
    command -v "$program" >/dev/null || missing=1
done
[ -n "${missing:-}" ] || exit 0

# Maintainer scripts would start the services; a policy forbids it, unless the machine has one already.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
