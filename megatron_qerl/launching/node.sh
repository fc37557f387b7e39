#!/usr/bin/env bash
# One node of a run: torchrun with this node's ranks, each with a log of its own.
# usage: node.sh NODE_RANK NODES RANKS_PER_NODE MASTER_ADDR MASTER_PORT LOGS PYTHON ARGUMENT...
# ARGUMENTs are those of megatron-qerl. LOGS is a shared folder.
set -euo pipefail
node_rank=$1 nodes=$2 ranks_per_node=$3 master_addr=$4 master_port=$5 python=$7
export QERL_LOGS=$6
shift 7
# SIGUSR1 is for the ranks, which ask for it; torchrun would die of it.
trap '' USR1
# shellcheck disable=SC2016 # each rank expands its own RANK
exec "$python" -m torch.distributed.run \
    --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$ranks_per_node" --max-restarts 0 \
    --master-addr "$master_addr" --master-port "$master_port" --no-python \
    bash -c 'exec "$@" >"$QERL_LOGS/rank_$RANK.log" 2>&1' rank "$python" -m megatron_qerl.cli.main "$@"
