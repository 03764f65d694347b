#!/usr/bin/env bash
# One process a host, each with all of its host's GPUs:  sbatch --nodes=4 experiments/launch/slurm.sh [ARGUMENTS OF pretrain]
# Another program: PROGRAM=experiments/other.py sbatch ...   Another Python: PYTHON=/path/to/python sbatch ...
#SBATCH --job-name=moejax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start me with sbatch}"   # sbatch runs a copy of this file from its own folder

# Who coordinates: the first host. A port of this job's own, below the range that the kernel hands out (32768 and up), so that
# two jobs on one host do not meet; process 0 says so when something else holds it.
read -r host < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MOEJAX_COORDINATOR="$host:$((20000 + SLURM_JOB_ID % 10000))"
export MOEJAX_PROCESSES="$SLURM_JOB_NUM_NODES"
export MOEJAX_TIMEOUT_S=1800                     # a cold start: containers and file systems come minutes apart
# MOEJAX_PROCESS_ID differs from task to task: it is set below, inside srun.

# Compiled programs, on a file system that all hosts see: a requeued job starts without compiling again.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$SLURM_SUBMIT_DIR/.jax_cache}"
mkdir -p "$JAX_COMPILATION_CACHE_DIR"

# gRPC follows proxy variables and would look for the coordinator there: all timeouts, no reason given.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY

# 5 minutes before the time is up SLURM signals this shell (B:) and the job queues itself again; --requeue does so when a host is lost
# or the job is taken away. It keeps its number, so that pretrain goes on from the last checkpoint of the run that it had started.
trap 'echo "time is nearly up: queued again"; scontrol requeue "$SLURM_JOB_ID"' USR1
program=${PROGRAM:-experiments/pretrain.py}
if [ "$program" = experiments/pretrain.py ]; then
  read -r last < <(ls -td "runs/slurm-$SLURM_JOB_ID"/*/checkpoint/[0-9]* 2>/dev/null) || last=""
  if [ -n "$last" ]; then set -- "$@" --resume "${last%/checkpoint/*}"; else set -- "$@" --out "runs/slurm-$SLURM_JOB_ID"; fi
  set -- "$@" --compile-cache "$JAX_COMPILATION_CACHE_DIR"
fi

# --kill-on-bad-exit: one host's failure ends the others at once. In the background, because bash runs a trap only between commands.
# srun's own --gpus-per-task would hide 7 of 8 GPUs: it is not given; --cpus-per-task is, because sbatch's does not reach srun.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  --kill-on-bad-exit=1 --label \
  bash -c 'MOEJAX_PROCESS_ID=$SLURM_PROCID exec "$0" -u "$@"' "${PYTHON:-.venv/bin/python}" "$program" "$@" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done   # a signal ends a wait, not the step
status=0
wait "$step" || status=$?                        # bash keeps the status of what has ended
exit "$status"
