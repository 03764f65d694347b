#!/usr/bin/env bash
# One process a host over ssh, for hosts without a scheduler:  HOSTS="node1 node2" experiments/launch/ssh.sh [ARGUMENTS OF pretrain]
# Every host has this folder at the same path (a shared file system, or a copy), key login, and the port open between them.
# HOSTS     names as the hosts know each other; the first one coordinates (user@name is fine)
# PORT      of the coordinator, default 8476      PYTHON, PROGRAM, FOLDER, SSH: what runs, where, and by which client
set -euo pipefail
read -r -a hosts <<<"${HOSTS:?name the hosts: HOSTS="node1 node2" $0}"
folder=${FOLDER:-$PWD}
read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4}"
pids=()

stop() {                                        # -tt: closing the connection hangs up the remote terminal, which ends the process there
  local pid
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
}
trap 'stop; exit 130' INT TERM
trap stop EXIT

for i in "${!hosts[@]}"; do
  # printf %q: the other host's shell must read the arguments as they were given here.
  command=$(printf '%q ' env \
    "MOEJAX_COORDINATOR=${hosts[0]#*@}:${PORT:-8476}" "MOEJAX_PROCESSES=${#hosts[@]}" "MOEJAX_PROCESS_ID=$i" \
    "MOEJAX_TIMEOUT_S=${MOEJAX_TIMEOUT_S:-600}" \
    "JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$folder/.jax_cache}" \
    "${PYTHON:-.venv/bin/python}" -u "${PROGRAM:-experiments/pretrain.py}" "$@")
  # In a process substitution the output gets its number and $! stays ssh itself.
  "${ssh[@]}" -tt "${hosts[$i]}" "cd $(printf %q "$folder") && $command" </dev/null > >(sed -u "s/^/[$i] /; s/\r\$//") 2>&1 &
  pids+=($!)
done

# The first that fails ends the others. By asking each: wait -n with a list that holds an ended process differs between bash versions.
while [ "${#pids[@]}" -gt 0 ]; do
  running=()
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then running+=("$pid"); continue; fi
    status=0
    wait "$pid" || status=$?
    if [ "$status" -ne 0 ]; then
      echo "a process ended with exit status $status; ending the others" >&2
      exit "$status"
    fi
  done
  pids=("${running[@]}")
  sleep 0.5
done
