#!/usr/bin/env bash
# What run.sbatch has every node do: `node.sh ray` (each node), `node.sh command` and `node.sh attach` (the first).
# The variables are run.sbatch's; the files `stop` and `end` in LOGS are its messages.
set -uo pipefail
cd "$REPOSITORY" || exit 1
eval "$SETUP"
export PATH="$ENV_BIN:$PATH" PYTHONPATH="$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}"

address() { # of this node
  if [[ -n $NODE_INTERFACE ]]; then
    ip -4 -o addr show dev "$NODE_INTERFACE" | awk '{ split($4, a, "/"); print a[1]; exit }'
  else
    python -c 'import ray; print(ray.util.get_node_ip_address())'
  fi
}

head_address() { # once Ray's head answers there
  local at
  for ((waited = 0; waited < NODES_WAIT_S; waited++)); do
    at=$(cat "$LOGS/head" 2> /dev/null) && (exec 3<> "/dev/tcp/${at/:/\/}") 2> /dev/null && echo "$at" && return
    sleep 1
  done
  echo "Ray's head did not answer within $NODES_WAIT_S s" >&2
  return 1
}

ray_node() {
  local me child options cancelled=no mark=$RAY_TMP/made-by-job-$SLURM_JOB_ID
  me=$(address)
  [[ -e $RAY_TMP ]] || { mkdir -p "$RAY_TMP" && touch "$mark"; }
  options=(--node-ip-address="$me" --num-cpus="${CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-$(nproc)}}" --disable-usage-stats
    --num-gpus="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}")
  if [[ $SLURM_NODEID == 0 ]]; then
    options+=(--head --port="$RAY_PORT" --temp-dir="$RAY_TMP" --include-dashboard=false)
    echo "$me:$RAY_PORT" > "$LOGS/head.new" && mv "$LOGS/head.new" "$LOGS/head"
  else
    options+=(--address="$(head_address)") || exit 1
  fi
  # In a session of its own, by which all of it is found when it has to end, after a plain scancel, too.
  trap 'cancelled=yes' TERM
  setsid ray start --block "${options[@]}" &
  child=$!
  while kill -0 "$child" 2> /dev/null && [[ ! -f $LOGS/end && $cancelled == no ]]; do sleep 1; done
  [[ -f $LOGS/end ]] || echo "Ray on $SLURMD_NODENAME ended before the command did" >&2
  kill -TERM "$child" 2> /dev/null
  for _ in {1..20}; do pgrep --session "$child" > /dev/null || break; sleep 0.5; done
  pkill -KILL --session "$child"
  mkdir -p "$LOGS/ray-$SLURMD_NODENAME"
  cp -r "$RAY_TMP"/session_latest/logs/. "$LOGS/ray-$SLURMD_NODENAME/"
  # Only what was made here; run.sbatch removes the head's.
  [[ $(< "$LOGS/head") == "$me":* || ! -f $mark ]] || rm -rf "$RAY_TMP"
}

wait_for_nodes() {
  python - "$NODES" "$NODES_WAIT_S" <<'PYTHON'
import sys, time
import ray
nodes, limit = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
ray.init(log_to_driver=False, logging_level="ERROR")
while (here := sum(node["Alive"] for node in ray.nodes())) < nodes:
    if time.monotonic() > limit:
        sys.exit(f"{here} of {nodes} nodes joined Ray within {sys.argv[2]} s; see ray-*.log")
    time.sleep(1)
print(f"{here} of {nodes} nodes are in", flush=True)
PYTHON
}

run_command() {
  local child asked=no status
  RAY_ADDRESS=$(head_address) && export RAY_ADDRESS && wait_for_nodes || { echo 1 > "$LOGS/status"; exit 1; }
  # In a session of its own, so that it gets one signal, from here.
  setsid bash -c "exec env $COMMAND" &
  child=$!
  trap 'touch "$LOGS/stop"' TERM INT USR1
  while kill -0 "$child" 2> /dev/null; do
    [[ $asked == no && -f $LOGS/stop ]] && asked=yes && kill -TERM "$child"
    sleep 1
  done
  wait "$child"
  status=$?
  echo "$status" > "$LOGS/status"
  exit "$status"
}

case $1 in
  ray) ray_node ;;
  command) run_command ;;
  attach)
    shift
    RAY_ADDRESS=$(head_address) && export RAY_ADDRESS || exit 1
    exec "${@:-${SHELL:-bash}}"
    ;;
esac
