#!/usr/bin/env bash
# The first process of a host of the lab, in namespaces of its own.
#
# usage: host.sh NAME ADDRESS/PREFIX STATE KEPT...
#   STATE   its folder: hosts, passwd, group, ssh/ (and "ready" once it is)
#   KEPT    folders of the machine that are there as they are
set -euo pipefail
name=$1 address=$2 state=$3
shift 3
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"

# /tmp, /run and the home are the host's own; what is kept shows through.
aside=/mnt
mount -t tmpfs -o mode=755 lab $aside
count=0
for folder in "$state" "$@"; do
  mkdir "$aside/$count"
  mount --bind "$folder" "$aside/$count"
  count=$((count + 1))
done
for folder in /tmp /run /var/tmp /dev/shm; do
  mount -t tmpfs -o mode=1777 lab $folder
done
mount -t tmpfs -o mode=755 lab /home
count=0
for folder in "$state" "$@"; do
  mkdir -p "$folder"
  mount --bind "$aside/$count" "$folder"
  count=$((count + 1))
done
for file in hosts passwd group; do
  mount --bind "$state/$file" /etc/$file
done
# Otherwise all hosts look like one machine.
cat /proc/sys/kernel/random/uuid > /run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id

ip link set lo up
until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
ip addr add "$address" dev eth0
ip link set eth0 up

if [ -d "$state/ssh" ]; then
  mount --bind "$state/ssh" /etc/ssh
  mkdir -p /home/lab/.ssh /run/sshd
  cp /etc/ssh/id_ed25519 /etc/ssh/authorized_keys /etc/ssh/known_hosts /home/lab/.ssh
  chmod -R go= /home/lab
  "$(command -v sshd || echo /usr/sbin/sshd)" -e -f /etc/ssh/sshd_config
fi
mkdir -p /home/lab
touch "$state/ready"
# The first process inherits orphans, and takes leave of them.
while :; do wait -n 2> /dev/null || sleep 0.2; done
