#!/usr/bin/env bash
# On a host with a GPU: the tests that need one, then the benchmarks, within 9 minutes; everything into one JSON, whole logs
# beside it (bench_gpu.logs).
#
#   bash launch/bench_gpu.sh [--output FILE] [--seconds N] [--only STAGE ...]     default: bench_gpu.json, 540 s
#   bash launch/bench_gpu.sh --list                                             the stages and what they run
#
# The stages 1.3b-fp8 and 7b-fp8 compare FP8 with bf16 in speed (the ratio of the row megastable-bf16). What it makes of
# the loss over 1,000 steps of text takes longer, and is asked for by itself (val_loss in runs/text-*/summary.json):
#   megastable prepare stdlib --output data/stdlib
#   for fp8 in off current delayed block; do
#     python3 -m deepspeed.launcher.runner --num_gpus 1 --module megastable.train launch/recipes/quickstart.yaml \
#       train.steps=1000 data.corpora='[{path: data/stdlib}]' run.dir=runs/text-$fp8 precision.fp8=$fp8
#   done
#
# Takes .venv/bin/python where that sees the GPU, else python3 (with DeepSpeed beside it).
# Exit code: 0 when every stage passed, 1 when one failed (the others are measured all the same), 2 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in -h | --help) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' launch/bench_gpu.sh; exit 0 ;; esac

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
case " $* " in
  *" --list "*)
    for python in .venv/bin/python python3; do
      "$python" -c 'import benchmarks.suite' 2>/dev/null && exec "$python" -m benchmarks.suite "$@"
    done
    echo 'error: --list: neither .venv/bin/python nor python3 has what megastable needs: bash launch/install.sh' >&2
    exit 2
    ;;
esac
looks='import sys, torch; sys.exit(not torch.cuda.is_available())'
for python in .venv/bin/python python3; do
  if "$python" -c "$looks" 2>/dev/null; then
    "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("deepspeed"))' && exec "$python" -m benchmarks.suite "$@"
    echo "error: $python sees a GPU but has no deepspeed: bash launch/install.sh, or put it on PYTHONPATH" >&2
    exit 2
  fi
done
echo 'error: no GPU: neither .venv/bin/python nor python3 has a torch that sees one (nvidia-smi tells if it is there)' >&2
exit 2
