# shellcheck shell=bash
# The body of a run on plain hosts; megatron-qerl launch writes the head, which sets the variables named here.
# Ctrl-C, SIGTERM and SIGUSR1 ask the run to stop and save; the same script goes on from there.
set -uo pipefail
: "${names[0]:?}" "${ranks_per_node:?}" "${python:?}" "${workdir:?}" "${folder:?}" "${log_root:?}" "${port:?}"
: "${configs[0]:?}" "${run_dirs[0]:?}" "${preflight:?}"
# shellcheck disable=SC2154
declare -p ssh_options variables >/dev/null # may be empty

logs=$log_root/hosts/$(date +%Y%m%dT%H%M%S)
stop=$logs/stop
config=$folder/${configs[0]}
say() { printf '%s %s\n' "$(date +%FT%T)" "$*"; }

# everywhere LOG WORD...: run a command on all hosts, with {node} replaced by the host's number; returns the worst code.
everywhere() {
    local log=$1 i code worst=0 pids=() command
    shift
    for i in "${!names[@]}"; do
        # shellcheck disable=SC2154
        command=(env "${variables[@]}" "${@//\{node\}/$i}")
        # The remote shell gets one text, so every word is quoted for it. In a session of its own ssh gets no Ctrl-C.
        # shellcheck disable=SC2029 # expanded here on purpose
        setsid ssh "${ssh_options[@]}" "${names[$i]}" "cd $(printf %q "$workdir") && $(printf '%q ' "${command[@]}")" \
            </dev/null >"$logs/${log}_$i.log" 2>&1 &
        pids+=($!)
    done
    for i in "${!pids[@]}"; do
        while :; do
            wait "${pids[$i]}"
            code=$?
            kill -0 "${pids[$i]}" 2>/dev/null || break
        done
        [ "$code" = 0 ] || say "${names[$i]} ended with $code, see $logs/${log}_$i.log"
        [ "$code" -le "$worst" ] || worst=$code
    done
    return "$worst"
}

mkdir -p "$logs"
ln -sfn "hosts/${logs##*/}" "$log_root/latest"
trap 'say "asked to stop"; : >>"$stop"' INT TERM USR1
say "logs in $logs"
if [ -e "${run_dirs[0]}/summary.json" ]; then
    say "the run is finished: ${run_dirs[0]}"
    exit 0
fi
addresses=("${names[@]##*@}")
if [ "$preflight" = 1 ]; then
    say "preflight"
    everywhere preflight "$python" -m megatron_qerl.cli.main doctor --cluster "$folder/cluster.yaml" \
        --run-config "$config" --report "$logs/preflight" --nodes "$(IFS=,; echo "${addresses[*]}")" \
        --node-index '{node}' --port "$port"
    code=$?
    cat "$logs/preflight/verdict.txt" 2>/dev/null
    [ "$code" = 0 ] || exit "$code"
fi
[ ! -e "$stop" ] || exit 75
everywhere node bash "$folder/node.sh" '{node}' "${#names[@]}" "$ranks_per_node" "${addresses[0]}" "$port" "$logs" \
    "$python" train "$config" --resume --stop-file "$stop"
code=$?
if [ "$code" = 0 ]; then
    say "finished: ${run_dirs[0]}"
elif grep -qs '^saved' "$stop"; then
    say "stopped ($(cat "$stop")); start the script again to go on"
    exit 75
else
    say "failed; the ranks' logs are $logs/rank_*.log"
fi
exit "$code"
