#!/usr/bin/env bash
# From a clone to a trained GPT in minutes, without a GPU: installs, prepares the source of Python's standard library
# as a corpus, plants noise in a copy of it, trains on that on two processes through the deepspeed launcher, and says
# what became of the noise and where everything is.
#
#   bash launch/quickstart.sh [OVERRIDE ...]     e.g. train.steps=50 run.dir=runs/short
#   bash launch/quickstart.sh data.corpora='[{path: data/stdlib}]' run.dir=runs/clean     without the noise
#
# Call it again to train again (the finished run is kept beside it), or to go on where an interrupted one stopped.
# Exit code: that of the training (0 done, 75 stopped with a checkpoint, 78 start again, others in docs/clusters.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in -h | --help) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' launch/quickstart.sh; exit 0 ;; esac
bash launch/install.sh

.venv/bin/python tools/prepare_data.py stdlib --output data/stdlib
case " $*" in
  *" data.corpora"*) ;; # the user's own
  *) .venv/bin/python tools/prepare_data.py plant data/stdlib data/stdlib-planted --overwrite \
    --recipe launch/recipes/quickstart.yaml -- "$@" ;;
esac

run=runs/quickstart
for argument in "$@"; do
  case $argument in run.dir=*) run=${argument#run.dir=} ;; esac
done
if [ -f "$run/summary.json" ]; then
  kept=$run-$(date -r "$run/summary.json" +%Y%m%d-%H%M%S)
  mv -T "$run" "$kept"
  echo "the finished run of before is now $kept"
elif [ -d "$run" ]; then
  echo "going on with the unfinished run in $run"
fi

ranks=2
gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" -ge "$ranks" ] || export DS_ACCELERATOR=cpu
cores=$(env -u OMP_NUM_THREADS nproc)
export OMP_NUM_THREADS=$((cores < ranks ? 1 : cores > 8 * ranks ? 8 : cores / ranks))
port=$(.venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# In a session of its own, so that Ctrl-C comes here first: given to the launcher it would kill the ranks after 30
# seconds, checkpoint or not. Told to stop themselves, they save, and the launcher ends with their exit code.
setsid .venv/bin/deepspeed --num_gpus "$ranks" --master_port "$port" --quiet \
  --module megastable.train launch/recipes/quickstart.yaml "$@" run.dir="$run" &
launcher=$!
stop() {
  interrupted=1
  echo 'stopping: the ranks finish their step and save; Ctrl-C again ends them at once'
  trap 'interrupted=1; kill -TERM -- "-$launcher"' INT TERM HUP
  .venv/bin/python - "$launcher" <<'PYTHON'
import sys
import time
from pathlib import Path

import psutil


def listens(process: psutil.Process) -> bool:
    """Whether it catches SIGTERM already; before that the signal would just kill it."""
    caught = Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) >> 14 & 1)


def ranks(launcher: psutil.Process) -> list[psutil.Process]:
    found = []
    for process in launcher.children(recursive=True):
        try:
            arguments = process.cmdline()
            if "megastable.train" in arguments and "--module" not in arguments:
                found.append(process)
        except psutil.Error:
            continue  # gone in the meantime
    return found


# The ranks are the launcher's grandchildren; just after the start they are not there yet, or do not listen yet.
launcher = psutil.Process(int(sys.argv[1]))
while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
    try:
        found = ranks(launcher)
        if found and all(map(listens, found)):
            for rank in found:
                rank.terminate()
            break
    except (psutil.Error, OSError, IndexError):
        pass  # one of them ended: look again
    time.sleep(0.2)
PYTHON
}
trap stop INT TERM HUP
interrupted=1
while [ -n "$interrupted" ]; do # a signal ends `wait` early
  interrupted='' code=0
  wait "$launcher" || code=$?
done

if [ "$code" -eq 75 ]; then
  echo "stopped; a checkpoint is in $run. The same command goes on from there"
  exit 75
elif [ "$code" -eq 78 ]; then
  echo "handed over: the same command goes on from an older checkpoint in $run (docs/stability.md)"
  exit 78
elif [ "$code" -ne 0 ] || [ ! -f "$run/summary.json" ]; then
  echo "error: the training ended with code $code before it was done; its last words are above" >&2
  exit $((code ? code : 1))
fi

.venv/bin/python -m megastable.report.story "$run"
