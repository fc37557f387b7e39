#!/usr/bin/env bash
# A run on this machine, one rank for each GPU (or RANKS ranks), each with a log of its own.
#
#   bash launch/local.sh configs/demo.yaml run.name=first --resume
#   RANKS=2 PYTHON=/path/to/python bash launch/local.sh configs/demo.yaml
#
# Ctrl-C and SIGTERM ask the run to save and stop; with --resume it goes on from there. Exit code 75 says that it did.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# = 0 ]; then
    sed -n '2,7p' "${BASH_SOURCE[0]}" | cut -c3- >&2
    exit 2
fi
python=${PYTHON:-$root/.venv/bin/python}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ')
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
logs=${LOGS:-logs/local/$(date +%Y%m%dT%H%M%S)}
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
stop=$logs/stop
rm -f "$stop"
# Any free port: nobody else has to know it.
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])') || exit 2

echo "$ranks ranks, logs in $logs"
node=$("$python" -c 'from importlib import resources; print(resources.files("megatron_qerl.launching") / "node.sh")') || exit 2
# In a session of its own: Ctrl-C goes to all of a terminal's group, and torchrun would end the ranks at once.
setsid bash "$node" 0 1 "$ranks" 127.0.0.1 "$port" "$logs" "$python" \
    train "$@" --stop-file "$stop" >"$logs/node_0.log" 2>&1 &
pid=$!
trap 'echo "asked to stop, saving"; : >>"$stop"' INT TERM USR1
while :; do
    wait "$pid"
    code=$?
    kill -0 "$pid" 2>/dev/null || break
done
if grep -qs '^saved' "$stop"; then
    echo "stopped ($(cat "$stop")); go on with --resume"
    exit 75
fi
if [ "$code" != 0 ]; then
    echo "failed with $code; the ranks' logs end with:" >&2
    tail -n 3 "$logs"/rank_*.log >&2
    exit "$code"
fi
tail -n 2 "$logs/rank_0.log"
