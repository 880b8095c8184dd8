#!/usr/bin/env bash
# Runs a command on the first of two hosts that can only reach each other by network and ssh: two network namespaces
# joined by a bridge, each with its own interface eth0, host name, /dev/shm and sshd.
#
#   bash two_hosts.sh FOLDER COMMAND...
#
# FOLDER gets: hostfile, .deepspeed_env, bin/ (an ssh that knows the key), received (bytes that came in over each
# eth0), logs. Needs root, iproute2, openssh and pdsh. Everything happens inside namespaces that end with this
# script or with whoever called it, however they end: the kernel then ends every process in them and takes the
# network away.
set -euo pipefail

if [ -z "${MEGASTABLE_TWO_HOSTS_INSIDE:-}" ]; then
  export MEGASTABLE_TWO_HOSTS_INSIDE=1
  exec setpriv --pdeathsig KILL unshare --mount --net --pid --ipc --fork --kill-child --mount-proc bash "${BASH_SOURCE[0]}" "$@"
fi

folder=$(cd "$1" && pwd)
shift
names=(first second)
addresses=(10.77.0.1 10.77.0.2)

mount -t tmpfs tmpfs /run # private: `ip netns` and sshd keep their state here
mkdir -p /run/netns /run/sshd "$folder/bin"
printf '%s %s\n' 127.0.0.1 localhost "${addresses[0]}" "${names[0]}" "${addresses[1]}" "${names[1]}" >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts

mkdir -m 700 "$folder/ssh"
ssh-keygen -q -t ed25519 -N '' -f "$folder/ssh/user"
ssh-keygen -q -t ed25519 -N '' -f "$folder/ssh/host"
cat >"$folder/ssh/sshd_config" <<CONFIG
HostKey $folder/ssh/host
AuthorizedKeysFile $folder/ssh/user.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
CONFIG
cat >"$folder/bin/ssh" <<WRAPPER
#!/bin/sh
exec $(command -v ssh) -F none -i $folder/ssh/user -o IdentitiesOnly=yes -o BatchMode=yes -o LogLevel=ERROR \
  -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "\$@"
WRAPPER
chmod +x "$folder/bin/ssh"

on() { # on HOST COMMAND...: with the host's own network, name and /dev/shm
  local host=$1
  shift
  ip netns exec "$host" unshare --mount --uts -- sh -c \
    'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"' "$host" "$@"
}

ip link add switch type bridge
ip link set switch up
for i in 0 1; do
  ip netns add "${names[i]}"
  ip link add "port$i" master switch type veth peer name eth0 netns "${names[i]}"
  ip link set "port$i" up
  ip -n "${names[i]}" address add "${addresses[i]}/24" dev eth0
  ip -n "${names[i]}" link set lo up
  ip -n "${names[i]}" link set eth0 up
  on "${names[i]}" "$(command -v sshd)" -D -f "$folder/ssh/sshd_config" -E "$folder/sshd-${names[i]}.log" &
done

printf '%s slots=1\n' "${addresses[@]}" >"$folder/hostfile"
# Read by deepspeed and exported on every host. Without the first line gloo would look up the host's name.
printf '%s\n' GLOO_SOCKET_IFNAME=eth0 DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 >"$folder/.deepspeed_env"
export DS_ENV_FILE=$folder/.deepspeed_env PATH=$folder/bin:$PATH

for address in "${addresses[@]}"; do
  for try in $(seq 50); do
    on first ssh "$address" true 2>>"$folder/ssh.log" && break
    [ "$try" -lt 50 ] || { echo "no ssh to $address: $(cat "$folder"/*.log)" >&2; exit 99; }
    sleep 0.2
  done
done

code=0
on first "$@" || code=$?
for name in "${names[@]}"; do
  ip netns exec "$name" cat /proc/net/dev | awk -v name="$name" '$1 == "eth0:" { print name, $2 }'
done >"$folder/received"
exit $code
