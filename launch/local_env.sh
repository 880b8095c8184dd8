#!/usr/bin/env bash
# Puts the code and its environment on the local disk of every host: a rank opens 3,000 files to start, and 10,000 ranks
# would open them all on the file system that they share (docs/clusters.md).
#
#   bash launch/local_env.sh pack ARCHIVE            in the repository, after launch/install.sh: it and .venv in one file
#   bash launch/local_env.sh unpack ARCHIVE FOLDER   on every host, e.g. srun --ntasks-per-node=1; prints where it is
#
# Each host reads the archive once, also if several ask at once, and keeps it: the name in FOLDER is the archive's hash.
# Start from there, in the same way as from the repository; run.dir and data.corpora as absolute paths.
set -euo pipefail
case ${1-} in -h | --help) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; exit 0 ;; esac
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

pack() {
  local archive
  archive=$(realpath "$1")
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  [ -x .venv/bin/python ] || die "$PWD/.venv is not there: bash launch/install.sh makes it"
  printf '%s\n' "$PWD" >.venv/.packed_from
  { git ls-files -z && printf '.venv\0'; } | tar --create --null --files-from - --file "$archive.partial"
  sha256sum <"$archive.partial" | cut -c 1-64 >"$archive.sha256"
  mv "$archive.partial" "$archive"
}

unpack() {
  local archive=$1 folder=$2 hash from target
  hash=$(cat "$archive.sha256") || die "$archive.sha256 is not there: pack the archive first"
  mkdir -p "$folder"
  target=$(realpath "$folder")/$hash
  exec 9>"$folder/.lock"
  flock 9
  if [ ! -d "$target" ]; then
    rm -rf "$target".partial*
    mkdir "$target.partial"
    mkfifo "$target.partial.pipe"
    sha256sum <"$target.partial.pipe" >"$target.partial.hash" 9>&- &
    local problem=""
    tee -p "$target.partial.pipe" <"$archive" | tar --extract --directory "$target.partial" || problem=yes
    wait $!
    [ "$(cut -c 1-64 "$target.partial.hash")" = "$hash" ] || die "$archive is not what $archive.sha256 says: pack it again"
    [ -z "$problem" ] || die "$archive could not be unpacked to $folder, see above: make room there"
    # What pip has written names the place of the repository; the modules do not.
    from=$(cat "$target.partial/.venv/.packed_from")
    grep -rlI --include='__editable__*' --include='*.pth' --include='pyvenv.cfg' -e "$from" "$target.partial/.venv" |
      xargs --no-run-if-empty sed -i "s#$from#$target#g"
    grep -lI -e "$from" "$target.partial"/.venv/bin/* | xargs --no-run-if-empty sed -i "s#$from#$target#g"
    mv "$target.partial" "$target"
    rm -f "$target".partial.*
  fi
  printf '%s\n' "$target"
}

case ${1-}:$# in
  pack:2) pack "$2" ;;
  unpack:3) unpack "$2" "$3" ;;
  *) die "pack ARCHIVE, or unpack ARCHIVE FOLDER; --help says more" ;;
esac
