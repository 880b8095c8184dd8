#!/usr/bin/env bash
# What can be verified about GPUs without one: tests/gpu_static, on the versions that a GPU host runs (torch for
# CUDA, Triton, DeepSpeed, Transformer Engine), in an environment of its own. The first run downloads about 3 GB.
#
#   bash launch/test.sh gpu-static [PYTEST ARGUMENT ...]     the checks, then a table of them
#   bash launch/gpu_static.sh --python                       only install; prints the environment's python
#
#   GPU_STATIC_DIR   where the environment is (default .gpu-static; 6 GB)
#   PYTHON           the interpreter it is made of (default: the first of python3.12, python3.13, python3.11)
#   TE_TORCH_WHEEL   a wheel of transformer_engine_torch for that interpreter and torch. The package index holds its
#                    sources only; without a wheel they are built if there is an nvcc, else those checks are left out
#
# The log of the installation is GPU_STATIC_DIR/install.log; an interrupted one goes on where it stopped.
# Exit code: 0 when every check that could run passed, 1 when one failed, 2 when the environment could not be made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in -h | --help) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' launch/gpu_static.sh; exit 0 ;; esac

torch=2.11.0 # in place of the one for CPUs in constraints.txt; setuptools as it allows; the rest as pinned there
engine=2.20.2
folder=${GPU_STATIC_DIR:-.gpu-static}
python=$folder/bin/python
log=$folder/install.log
stamp=$folder/.installed
device=$(realpath -m "$folder")/libfakegpu.so

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.13 python3.11}; do
    "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    command -v "$candidate"
    return
  done
  die "no usable ${PYTHON:-python3.11 to 3.13} with a venv module; name one: PYTHON=/path/to/python3.12"
}

stage() { # stage MESSAGE COMMAND...
  local message=$1 start=$SECONDS
  shift
  printf 'gpu-static: %s ... ' "$message" >&2
  printf '\n== %s: %s\n' "$message" "$*" >>"$log"
  if "$@" >>"$log" 2>&1; then
    printf '%d s\n' $((SECONDS - start)) >&2
  else
    printf 'failed\n' >&2
    tail -n 25 "$log" >&2
    return 1
  fi
}

wanted() { printf '%s\n' "torch $torch, Transformer Engine $engine, wheel ${TE_TORCH_WHEEL-}"; sha256sum constraints.txt pyproject.toml; }

needs() { # what the project and its tests need, as pyproject.toml says
  "$python" - <<'END'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["dev"]))
END
}

install() {
  mkdir -p "$folder"
  exec 9>>"$folder/.lock"
  flock 9
  if [ "$(cat "$stamp" 2>/dev/null)" = "$(wanted)" ]; then
    exec 9>&-
    return
  fi
  [ -x "$python" ] || stage 'virtual environment' "$(find_python)" -m venv "$folder" || die 'no virtual environment'
  { echo "torch==$torch"; grep -Ev '^(torch|setuptools)==' constraints.txt; } >"$folder/constraints.txt"
  needs >"$folder/needs.txt"
  local pip=("$python" -m pip install --disable-pip-version-check --no-input --constraint "$folder/constraints.txt")
  stage 'build tools' "${pip[@]}" setuptools wheel || die "$log says why"
  stage "torch $torch for CUDA, the largest part" "${pip[@]}" torch || die "$log says why"
  # Building DeepSpeed imports torch: in pip's isolation it would fetch another one.
  stage 'DeepSpeed' env DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation deepspeed || die "$log says why"
  stage 'what megastable and its tests need' "${pip[@]}" -r "$folder/needs.txt" || die "$log says why"
  stage "Transformer Engine $engine" "${pip[@]}" "transformer-engine==$engine" "transformer-engine-cu13==$engine" ||
    die "$log says why"
  if [ -n "${TE_TORCH_WHEEL-}" ]; then
    stage "its part for torch, from a wheel" "${pip[@]}" "$TE_TORCH_WHEEL" || die "$log says why"
  elif command -v nvcc >/dev/null; then
    stage "its part for torch, built here" "${pip[@]}" --no-build-isolation "transformer_engine_torch==$engine" ||
      echo 'gpu-static: the checks of Transformer Engine are left out' >&2
  else
    echo "gpu-static: neither TE_TORCH_WHEEL nor nvcc: the checks of Transformer Engine are left out" >&2
  fi
  wanted >"$stamp"
  exec 9>&-
}

# What torch asks of a driver, answered by a library that is loaded before it: tests/gpu_static/device.c.
build_device() {
  local packages
  packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  command -v cc >/dev/null || die 'no C compiler (cc): on Debian and Ubuntu apt-get install gcc'
  stage 'a GPU that is not there' cc -shared -fPIC -I "$packages/nvidia/cu13/include" \
    -I "$packages/triton/backends/nvidia/include" -Wl,-soname,libcuda.so.1 -o "$device" tests/gpu_static/device.c ||
    die "$log says why"
}

install
case ${1-} in --python) printf '%s\n' "$python"; exit 0 ;; esac
build_device
[ $# -gt 0 ] || set -- tests/gpu_static
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false DS_ACCELERATOR=cpu
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" - <<'END'
import platform
from importlib.metadata import version
names = {"torch": "torch", "Triton": "triton", "DeepSpeed": "deepspeed", "Transformer Engine": "transformer-engine"}
print(f"Python {platform.python_version()}, " + ", ".join(f"{n} {version(p)}" for n, p in names.items()))
END
LD_PRELOAD=$device exec "$python" -m pytest -n0 -p no:cacheprovider --show-capture=no "$@"
