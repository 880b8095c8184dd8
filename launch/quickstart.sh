#!/usr/bin/env bash
# From a clone to a trained GPT in minutes, on Linux, without a GPU: installs, prepares the source of Python's standard
# library as a corpus, plants noise in a copy of it, trains on that copy on two processes under the supervisor, and says
# what became of the noise and where everything is.
#
#   bash launch/quickstart.sh [OVERRIDE ...]     e.g. train.steps=150 run.dir=runs/short (noise: step 120)
#   bash launch/quickstart.sh model.experts='{count: 8, top_k: 2, ffn: 384, bias_rate: 0}' run.dir=runs/experts  experts
#   bash launch/quickstart.sh data.corpora='[{path: data/stdlib}]' run.dir=runs/clean     without the noise
#
# Call it again to train again (the finished run is kept beside it), or to go on where an interrupted one stopped.
# Exit code: that of the supervisor (0 done, 75 stopped with a checkpoint, others in docs/exit-codes.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in -h | --help) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' launch/quickstart.sh; exit 0 ;; esac
bash launch/install.sh

.venv/bin/megastable prepare stdlib --output data/stdlib
case " $*" in
  *" data.corpora"*) ;; # the user's own
  *) .venv/bin/megastable prepare plant data/stdlib data/stdlib-planted --overwrite \
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

# In a session of its own, so that it hears of Ctrl-C once, from here, and like SIGTERM: it has the ranks save.
setsid .venv/bin/python launch/supervise.py launch/recipes/quickstart.yaml "$@" run.dir="$run" -- --num_gpus "$ranks" &
supervisor=$!
trap 'interrupted=1; kill -TERM "$supervisor"' INT TERM HUP
interrupted=1
while [ -n "$interrupted" ]; do # a signal ends `wait` early
  interrupted='' code=0
  wait "$supervisor" || code=$?
done

if [ "$code" -eq 75 ]; then
  echo "stopped; a checkpoint is in $run. The same command goes on from there"
  exit 75
elif [ "$code" -ne 0 ] || [ ! -f "$run/summary.json" ]; then
  echo "error: the training ended with code $code before it was done; its last words are above" >&2
  exit $((code ? code : 1))
fi

.venv/bin/python -m megastable.report.story "$run"
