# shellcheck shell=bash
# The body of every Slurm job; megatron-qerl launch writes the head, which sets the variables named here.
# An attempt: is the run finished? -> preflight -> ranks -> finished, requeue, or say which log to read.
set -uo pipefail
: "${nodes:?}" "${ranks_per_node:?}" "${python:?}" "${workdir:?}" "${folder:?}" "${log_root:?}" "${max_attempts:?}"
: "${requeue:?}" "${preflight:?}" "${preflight_limit_s:?}" "${exclude?}" "${configs[0]:?}" "${run_dirs[0]:?}"
: "${step_flags[0]:?}"

task=${SLURM_ARRAY_TASK_ID:-0}
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$task}
job=${job:-$SLURM_JOB_ID}
attempt=${SLURM_RESTART_COUNT:-0}
config=$folder/${configs[$task]}
run_dir=${run_dirs[$task]}
logs=$log_root/$job/attempt_$attempt
stop=$logs/stop
# Jobs that share a node must not share a port: every job has eight of its own.
port=$((20000 + SLURM_JOB_ID % 5000 * 8))
asked=

say() { printf '%s %s\n' "$(date +%FT%T)" "$*"; }

# ln -sfn is not atomic, and a reader must always find a folder.
link() { ln -s "$1" "$2.$$" && mv -T "$2.$$" "$2"; }

# Run a command in the background and wait for it: bash handles signals only while it waits.
supervise() {
    local pid code
    "$@" &
    pid=$!
    while :; do
        wait "$pid"
        code=$?
        kill -0 "$pid" 2>/dev/null || return "$code"
    done
}

# shellcheck disable=SC2329 # supervise calls it
step() { srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "${step_flags[@]}" "$@"; }

hosts() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }

# again REASON [NODE...]: start this job once more, without the nodes named now or before.
again() {
    local reason=$1 bad=$log_root/$job/bad_nodes avoid left
    shift
    if [ "$requeue" = 0 ]; then
        say "$reason; the next job of the chain goes on"
        exit 75
    fi
    if [ $((attempt + 1)) -ge "$max_attempts" ]; then
        say "$reason; not requeued: this was attempt $((attempt + 1)) of slurm.max_attempts = $max_attempts"
        exit 1
    fi
    if [ $# != 0 ]; then
        printf '%s\n' "$@" >>"$bad"
        avoid=$({ [ -z "$exclude" ] || scontrol show hostnames "$exclude"; cat "$bad"; } | sort -u)
        # Slurm would let the job wait for ever.
        left=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format=%N | sort -u | grep -vcxF "$avoid")
        if [ "$left" -lt "$nodes" ]; then
            say "$reason; not requeued: $left other nodes are in $SLURM_JOB_PARTITION, and nodes = $nodes"
            exit 1
        fi
    fi
    say "$reason; requeued"
    trap '' TERM
    scontrol requeue "$SLURM_JOB_ID" || exit 1
    [ $# != 0 ] || exit 0
    avoid=$(paste -sd, <<<"$avoid")
    # Only a job that waits can be told which nodes to avoid, and this one ends at any moment.
    for _ in $(seq 50); do
        if scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$avoid" 2>"$logs/exclude.log"; then
            say "excluded: $avoid"
            exit 0
        fi
        sleep 0.2
    done
    say "could not exclude $avoid, see $logs/exclude.log; cancelled"
    scancel "$SLURM_JOB_ID"
    exit 1
}

# Print the nodes of this job on which nothing can be started any more.
dead_nodes() {
    local host
    for host in $(hosts); do
        { timeout --kill-after=5 20 srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" true >/dev/null 2>&1 || echo "$host"; } &
    done
    wait
}

check_nodes() {
    local code bad
    say "preflight on $SLURM_JOB_NODELIST"
    mkdir -p "$logs/preflight"
    supervise timeout --kill-after=10 $((preflight_limit_s + 30)) \
        srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 "${step_flags[@]}" \
        --output="$logs/preflight/%N.log" "$python" -m megatron_qerl.cli.main \
        doctor --cluster "$folder/cluster.yaml" --run-config "$config" --report "$logs/preflight" \
        --nodes "$(hosts | paste -sd,)" --port "$port"
    code=$?
    [ -z "$asked" ] || again "asked to stop during preflight"
    cat "$logs/preflight/verdict.txt" 2>/dev/null
    [ "$code" != 0 ] || return
    mapfile -t bad < <(cat "$logs/preflight/bad_nodes" 2>/dev/null || dead_nodes)
    [ ${#bad[@]} = 0 ] || again "preflight refused ${bad[*]}" "${bad[@]}"
    say "preflight failed (exit code $code) and no node is to blame; see $logs/preflight"
    exit 1
}

# What each torchrun saw fail first, one line a node: 0 if a signal ended it, else 1; when; which rank.
root_causes() {
    awk '/Root Cause/ { on = 1 } on && / time *:/ { at = $3 } on && / rank *:/ { rank = $3 }
        on && / exitcode *:/ { print ($3 < 0 ? 0 : 1), at, rank; on = 0 }' "$logs"/node_*.log 2>/dev/null | sort
}

# Say which rank failed first and where it says why. A rank that was killed cannot tell the others, which then blame
# whoever missed it first; so torchrun's word for it comes before theirs.
blame() {
    local rank
    rank=$(root_causes | awk '$1 == 0 { print $3; exit }')
    [ -n "$rank" ] || rank=$(grep -hos 'because rank [0-9]*' "$logs"/rank_*.log | grep -o '[0-9]*$' | head -n 1)
    [ -n "$rank" ] || rank=$(root_causes | awk '{ print $3; exit }')
    if [ -z "$rank" ]; then
        say "no rank says why; see $logs"
        return
    fi
    say "rank $rank failed; its log is $logs/rank_$rank.log and ends with:"
    tail -n 5 "$logs/rank_$rank.log"
}

trap 'asked=1; say "asked to stop"; : >>"$stop"' USR1
mkdir -p "$logs"
rm -f "$stop"
link "attempt_$attempt" "$log_root/$job/latest"
link "$job/attempt_$attempt" "$log_root/latest"
cd "$workdir" || exit 1
say "attempt $((attempt + 1)) of job $job on $SLURM_JOB_NODELIST, logs in $logs"
if [ -e "$run_dir/summary.json" ]; then
    say "the run is finished: $run_dir"
    exit 0
fi
[ "$preflight" = 0 ] || check_nodes

# shellcheck disable=SC2016 # each task expands its own SLURM_NODEID
supervise step --kill-on-bad-exit=1 --output="$logs/node_%n.log" bash -c 'exec bash "$0" "$SLURM_NODEID" "$@"' \
    "$folder/node.sh" "$nodes" "$ranks_per_node" "$(hosts | head -n 1)" "$port" "$logs" "$python" \
    train "$config" --resume --stop-file "$stop"
code=$?
if [ "$code" = 0 ]; then
    say "finished: $run_dir"
    exit 0
fi
if grep -qs '^saved' "$stop"; then
    again "stopped ($(cat "$stop"))"
fi
mapfile -t lost < <(dead_nodes)
[ ${#lost[@]} = 0 ] || again "lost ${lost[*]}" "${lost[@]}"
blame
exit 1
