#!/usr/bin/env bash
# Installs what the tests need, then lints, checks types and runs the tests; fails if any of them does, or if the
# tests leave a process or shared memory behind. A test that fails is run again, alone: one that passes then is named as
# FLAKY, and is not a failure. What the tests cost: .pytest_cache/durations.tsv (python -m tests.durations).
#
#   bash launch/test.sh                           quick: what CI runs, under ten minutes on two cores. A test of it
#                                                 that costs over 5 s is named, one over 10 s is an error, unless
#                                                 tests/durations.py gives a reason
#   bash launch/test.sh all [PYTEST ARGUMENT ...] full: also those marked slow: every layout of every choice, drills,
#                                                 browsers, clusters, installs, benchmarks
#   bash launch/test.sh gpu [PYTEST ARGUMENT ...] those that need a GPU; without one they are skipped
#   bash launch/test.sh gpu-static [...]          what of a GPU can be verified without one: gpu_static.sh, several GB
#   bash launch/test.sh PYTEST ARGUMENT ...       e.g. tests/data -k order, or -n0 for one test at a time
#
# The test across two hosts needs iproute2, openssh-server and pdsh, that of pages chromium and chromium-driver, that of
# alerts prometheus and prometheus-alertmanager (for promtool and amtool, 30 MB); where that starts no service (root, in
# a container) they are installed by apt-get, unless MEGASTABLE_APT=0. Without them those tests are skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in -h | --help) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' launch/test.sh; exit 0 ;; esac
[ "${1-}" != gpu-static ] || exec bash launch/gpu_static.sh "${@:2}"
tier=some
case ${1-} in
  '') tier=quick; set -- -m 'not slow' ;;
  all) tier=full; shift ;;
  gpu) tier=gpu; set -- -m gpu -n 0 "${@:2}" ;;
esac
bash launch/install.sh dev || exit

get_debian_packages() {
  local missing=()
  command -v ip >/dev/null || missing+=(iproute2)
  command -v sshd >/dev/null || missing+=(openssh-server)
  command -v pdsh >/dev/null || missing+=(pdsh)
  command -v chromium >/dev/null || missing+=(chromium)
  command -v chromedriver >/dev/null || missing+=(chromium-driver)
  command -v promtool >/dev/null || missing+=(prometheus)
  command -v amtool >/dev/null || missing+=(prometheus-alertmanager)
  [ ${#missing[@]} -gt 0 ] && [ "${MEGASTABLE_APT:-1}" != 0 ] && [ "$(id -u)" = 0 ] &&
    command -v apt-get >/dev/null && [ -x /usr/sbin/policy-rc.d ] || return 0
  printf 'test: apt-get install %s ... ' "${missing[*]}"
  local get=(timeout 240 apt-get -qq -o DPkg::Lock::Timeout=60)
  if { "${get[@]}" update; DEBIAN_FRONTEND=noninteractive "${get[@]}" install -y --no-install-recommends "${missing[@]}"; } \
    >.venv/apt.log 2>&1 </dev/null; then
    echo done
  else
    echo 'failed (.venv/apt.log); the tests that need them will be skipped'
  fi
}

failed=()
check() { # check NAME COMMAND...
  local name=$1
  shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
}

# Every process that the tests start, however detached, carries this in its environment.
mark=MEGASTABLE_TEST_RUN=$$-$(date +%s)
our_processes() { grep -lzsx "$mark" /proc/[0-9]*/environ | cut -d / -f 3; }

leaves_nothing() {
  local pid name rest=0
  for _ in 1 2 3 4 5; do [ -z "$(our_processes)" ] || sleep 1; done
  for pid in $(our_processes); do
    printf 'left running (ended now): %s %s\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline")"
    kill -KILL "$pid"
    rest=1
  done
  while read -r name; do
    # What a living process has mapped belongs to somebody else's run.
    if [ -O "/dev/shm/$name" ] && ! grep -qsF "/dev/shm/$name" /proc/[0-9]*/maps; then
      printf 'left in shared memory: /dev/shm/%s\n' "$name"
      rest=1
    fi
  done < <(comm -13 <(echo "$shm_before") <(ls -A /dev/shm | LC_ALL=C sort))
  return $rest
}

get_debian_packages
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE # each of some 2,000 processes would compile the tests and the package again
.venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || export DS_ACCELERATOR=cpu
shm_before=$(ls -A /dev/shm | LC_ALL=C sort)

# Beside the tests, whose ranks often wait for each other.
lint() {
  local name code=0
  for name in 'ruff check .' 'ruff format --check .' mypy; do
    printf '== %s\n' "$name"
    .venv/bin/$name || code=1
  done
  return $code
}
lint >.venv/lint.log 2>&1 &
linting=$!
trap 'kill $linting 2>/dev/null' EXIT

# A worker for each core, up to six. In the quick suite without the values that were compared: to have them costs every worker half
# a minute of reading the tests, and what fails is run again with them.
cores=$(env -u OMP_NUM_THREADS nproc)
workers=$((cores < 6 ? cores : 6))
run_tests() {
  local plainly=()
  [ $tier != quick ] || plainly=(--assert plain)
  env "$mark" MEGASTABLE_TIER=$tier .venv/bin/python -m pytest -n $workers --dist worksteal "${plainly[@]}" "$@"
  local code=$?
  [ $code -eq 1 ] || return $code
  echo '== pytest: what failed, again, one at a time'
  # Up to the third that fails again. Their output says which they were.
  env "$mark" MEGASTABLE_TIER=$tier .venv/bin/python -m pytest -n 0 -q --last-failed --last-failed-no-failures none --maxfail 3 -rA "$@" |
    sed 's/^PASSED /FLAKY: failed at first, passed alone: /'
  return "${PIPESTATUS[0]}"
}
tests_started=$SECONDS
check 'pytest' run_tests "$@"
check 'nothing left behind' leaves_nothing
# What cost too much is measured again, alone: another run beside it may have slowed it down.
costs_little() {
  local names
  .venv/bin/python -m tests.durations && return
  [ $tier = quick ] || return 0
  mapfile -t names < <(.venv/bin/python -m tests.durations --names)
  cp .pytest_cache/durations.tsv .pytest_cache/durations-of-all.tsv
  echo '== durations: those again, alone'
  env "$mark" MEGASTABLE_TIER=$tier .venv/bin/python -m pytest -n 0 -q -m 'not slow' "${names[@]}" >.venv/durations.log 2>&1
  .venv/bin/python -m tests.durations
}
check 'durations' costs_little
wait $linting || failed+=('lint')
cat .venv/lint.log
printf 'tests and lint: %d s, after %d s of installing\n' $((SECONDS - tests_started)) $tests_started

[ ${#failed[@]} -eq 0 ] || { printf 'FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")"; exit 1; }
echo 'all passed'
