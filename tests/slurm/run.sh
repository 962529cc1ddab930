#!/usr/bin/env bash
# A real Slurm on this machine (one controller, two slurmd) and the shipped script on it, as a user submits it.
#
#   apt-get install slurm-wlm munge      # once, as root
#   tests/slurm/run.sh                   # as root; about twelve minutes on two cores; leaves nothing running
#   tests/slurm/run.sh whole_job         # one of the checks: whole_job, job_asked_to_save, job_that_loses_processes,
#                                        # interactive, allocation, job_at_its_time_limit
#
# PYTHON: interpreter with the project's dependencies (default .venv/bin/python of the repository).
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$repository/.venv/bin/python}
work=$(mktemp -d /tmp/gdpo-slurm-XXXX)
export SLURM_CONF=$work/slurm.conf PATH=$PATH:/usr/sbin

start() {
  local host cores
  host=$(hostname -s) cores=$(nproc)
  mkdir "$work/state" "$work/spool.n1" "$work/spool.n2"
  (umask 077 && head -c 1024 /dev/urandom > "$work/munge.key")
  munged --force --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munged.pid" \
    --log-file="$work/munged.log" --seed-file="$work/munged.seed"
  # A job that was queued again starts when its old credential has expired: after ten seconds here, two minutes by default.
  cat > "$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
AuthInfo=socket=$work/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=$work/state
SlurmctldPidFile=$work/slurmctld.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdSpoolDir=$work/spool.%n
SlurmdPidFile=$work/slurmd.%n.pid
SlurmdLogFile=$work/slurmd.%n.log
MinJobAge=3600
KillWait=30
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=$cores RealMemory=4000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=$cores RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  slurmctld
  slurmd -N n1
  slurmd -N n2
  for _ in {1..60}; do
    [[ $(sinfo --noheader --format=%D --states=idle 2> /dev/null) == 2 ]] && return
    sleep 1
  done
  echo "the two nodes did not come up" >&2
  return 1
}

stop() {
  scancel --quiet --user=root 2> /dev/null || true
  for _ in {1..60}; do [[ -n $(squeue --noheader 2> /dev/null) ]] || break; sleep 1; done
  local file pid
  for file in slurmd.n1 slurmd.n2 slurmctld munged; do
    [[ -s $work/$file.pid ]] || continue
    pid=$(< "$work/$file.pid")
    kill "$pid" || continue
    for _ in {1..50}; do [[ $(ps -o stat= -p "$pid") == [!Z]* ]] || continue 2; sleep 0.2; done
    kill -KILL "$pid"
  done
  [[ $1 == 0 ]] && rm -rf "$work" || echo "what was written is in $work"
}
trap 'stop $?' EXIT

start
sinfo
"$python" "$repository/tests/slurm/check_jobs.py" "$work" "$@"
echo "all checks passed"
