#!/usr/bin/env bash
# hosts.sh: real hosts for the tests, on one machine. Each is systemd-nspawn over an overlay of this machine's own root, with a network
# namespace and an address of its own, systemd as PID 1, sshd, tmux, and the users root, deploy (no sudo), ops (sudo) and boss (sudo that asks for a password), all by key.
# Nothing ever leaves the machine: the addresses live on one bridge, and an `unreachable` route keeps them off the default route.
#
#   hosts.sh up N            hosts mtp${LAB}h1..mtp${LAB}hN, booted and answering on port 22; again: nothing happens
#   hosts.sh down            stop and remove everything
#   hosts.sh reset NAME      a fresh disk
#   hosts.sh reboot NAME     orderly, until it is back
#   hosts.sh crash NAME      power loss: no FIN, no SIGTERM; then booted again
#   hosts.sh cut|heal NAME   pull or plug the cable: the other side sees silence
#   hosts.sh hold NAME PID   that process of the host into a control group whose memory can be limited
#   hosts.sh limit NAME used|max   that group may have what it uses now, or all; hosts.sh kills NAME: how often the kernel has killed by it
#   hosts.sh givepid NAME PID   a `sleep 600` in the host with exactly that pid
#   hosts.sh exec NAME CMD   as root inside the host, not through ssh
#
# LAB: the lab's number, 0 to 199 (default 0): labs with different numbers share nothing, so that several may be up at once.
# LAB_PASSWORD: of boss (default: secret).
# LAB_DIR: where all of it lies (default /var/tmp/mtpdeploy-lab-$LAB). LAB_BIND: folders that the hosts see read-only, at the same path.
set -u
LAB=${LAB:-0}
LAB_DIR=${LAB_DIR:-/var/tmp/mtpdeploy-lab-$LAB}
PREFIX=mtp${LAB}h NET=10.79.$LAB BRIDGE=mtpbr$LAB GATE=$(printf '02:79:00:%02x:00:01' "$LAB") GROUP=mtplab$LAB
SELF=$(readlink -f "$0") H=$LAB_DIR/hosts
export LAB LAB_DIR LAB_BIND

die() { echo "hosts.sh: $*" >&2; exit 1; }
number() { local n=${1#"$PREFIX"}; [[ $n =~ ^[1-9]$ ]] || die "no such host: $1"; echo "$n"; }
address() { echo "$NET.$((10 + $(number "$1")))"; }
mac() { printf '02:79:00:%02x:00:%02x' "$LAB" $((10 + $(number "$1"))); }
hosts() { ls "$H" 2>/dev/null; }
start_time() { local l; { read -r l <"/proc/$1/stat"; } 2>/dev/null || return 1; l=${l##*) }; set -- $l; [ "$1" != Z ] && echo "${20}"; }
put_pid() { echo "$2 $(start_time "$2")" >"$1"; }
pid_of() { local p s; { read -r p s <"$1"; } 2>/dev/null || return 1; [ "$(start_time "$p")" = "$s" ] && echo "$p"; }
leader() { local p; p=$(pid_of "$H/$1/nspawn.pid") && pgrep -P "$p" | head -1; }
inside() { local l; l=$(leader "$1"); [ -n "$l" ] || return 1; shift; nsenter -t "$l" -m -u -i -n -p -C -r -w -- "$@"; }

# ---- what every disk starts with, over this machine's own root: users, keys, sshd, no timers, nothing of the machine's data
common() {
  local c=$LAB_DIR/common m=$LAB_DIR/m d u
  [ -e "$c.ok" ] && return 0
  umount "$m" 2>/dev/null; rm -rf "$c" "$LAB_DIR/w"; mkdir -p "$c" "$LAB_DIR/w" "$m"
  for d in /* /.[!.]*; do  # hide all but the system: a whiteout, then a fresh folder in its place
    case ${d#/} in bin|sbin|lib|lib32|lib64|libx32|usr|etc|var|proc|sys|dev) ;; *) [ -e "$d" ] && mknod "$c$d" c 0 0;; esac
  done
  mkdir -p "$c/var/lib"
  for d in var/log var/tmp var/cache var/spool var/lib/systemd var/lib/dbus; do [ -e "/$d" ] && mknod "$c/$d" c 0 0; done
  mount -t overlay "mtpcommon$LAB" -o "lowerdir=/,upperdir=$c,workdir=$LAB_DIR/w" "$m" || die "cannot mount an overlay"
  mkdir -p "$m"/{root,home,tmp,run,mnt,opt,srv,var/{log/journal,tmp,cache,spool,lib/systemd,lib/dbus},etc/systemd/journald.conf.d,etc/ssh/sshd_config.d}
  chmod 711 "$m/root"; chmod 1777 "$m/tmp" "$m/var/tmp"
  rm -f "$m"/etc/rc?.d/S* "$m"/etc/systemd/system/{timers,sockets,network-online,sysinit,getty}.target.wants/*
  for d in "$m"/etc/systemd/system/multi-user.target.wants/*; do rm -f "$d"; done
  mkdir -p "$m/etc/systemd/system/multi-user.target.wants"
  ln -sf /lib/systemd/system/ssh.service "$m/etc/systemd/system/multi-user.target.wants/ssh.service"
  ln -sf /lib/systemd/system/multi-user.target "$m/etc/systemd/system/default.target"
  for d in systemd-networkd systemd-resolved systemd-timesyncd systemd-udevd console-getty e2scrub_reap; do
    ln -sf /dev/null "$m/etc/systemd/system/$d.service"; done
  printf '[Journal]\nStorage=persistent\nSystemMaxUse=64M\nRateLimitIntervalSec=0\n' >"$m/etc/systemd/journald.conf.d/lab.conf"
  { echo "127.0.0.1 localhost"; for d in 1 2 3 4 5 6 7 8 9; do echo "$NET.$((10 + d)) $PREFIX$d"; done; } >"$m/etc/hosts"
  : >"$m/etc/fstab"; rm -f "$m/etc/resolv.conf" "$m/etc/machine-id" "$m/var/lib/dbus/machine-id" "$m"/etc/ssh/ssh_host_* "$m/etc/nologin"
  printf 'PermitRootLogin prohibit-password\nPasswordAuthentication no\nMaxStartups 100\n' >"$m/etc/ssh/sshd_config.d/00-lab.conf"
  for u in deploy ops boss; do
    chroot "$m" id $u >/dev/null 2>&1 || chroot "$m" useradd -m -s /bin/bash $u || die "useradd $u"
    mkdir -p -m 700 "$m/home/$u/.ssh"; cp "$LAB_DIR/ssh/user.pub" "$m/home/$u/.ssh/authorized_keys"
    chroot "$m" chown -R $u:$u "/home/$u"
  done
  mkdir -p -m 700 "$m/root/.ssh"; cp "$LAB_DIR/ssh/user.pub" "$m/root/.ssh/authorized_keys"
  mkdir -p "$m/etc/sudoers.d"; echo 'ops ALL=(ALL) NOPASSWD: ALL' >"$m/etc/sudoers.d/ops"; echo 'boss ALL=(ALL) ALL' >"$m/etc/sudoers.d/boss"
  chmod 440 "$m/etc/sudoers.d/"*; echo "boss:${LAB_PASSWORD:-secret}" | chroot "$m" chpasswd
  umount "$m" && touch "$c.ok"
}
keys() { mkdir -p -m 700 "$LAB_DIR/ssh"; [ -e "$LAB_DIR/ssh/user" ] || ssh-keygen -q -t ed25519 -N '' -C lab -f "$LAB_DIR/ssh/user"; }
known_hosts() {
  local n
  for n in $(hosts); do
    [ -e "$H/$n/hostkey.pub" ] && echo "$n,$(address "$n") $(cut -d' ' -f1,2 "$H/$n/hostkey.pub")"
  done >"$LAB_DIR/ssh/known_hosts"
}

# ---- network
guard() { ip route replace unreachable "$NET.0/24" metric 9999; }
no_ipv6() { echo 1 >"/proc/sys/net/ipv6/conf/$1/disable_ipv6" 2>/dev/null; :; }
bridge() {
  guard
  ip link show "$BRIDGE" >/dev/null 2>&1 || { ip link add "$BRIDGE" address $GATE type bridge stp_state 0 mcast_snooping 0 && no_ipv6 "$BRIDGE"; }
  ip addr replace "$NET.1/24" dev "$BRIDGE"; ip link set "$BRIDGE" up
}
plug() {
  local n=$1 a m; a=$(address "$n"); m=$(mac "$n")
  ip netns exec "$n" true 2>/dev/null || { ip netns del "$n" 2>/dev/null; ip netns add "$n" || return 1; }
  if ! ip netns exec "$n" ip link show eth0 >/dev/null 2>&1; then
    ip link del "$n" 2>/dev/null
    ip link add "$n" type veth peer name eth0 netns "$n" || return 1
    ip netns exec "$n" sh -c "echo 1 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6; ip link set lo up; ip link set eth0 address $m
      ip addr add $a/24 dev eth0; ip link set eth0 up; ip neigh replace $NET.1 lladdr $GATE dev eth0 nud permanent"
  fi
  no_ipv6 "$n"; ip link set "$n" master "$BRIDGE"; ip link set "$n" up
  ip neigh replace "$a" lladdr "$m" dev "$BRIDGE" nud permanent  # a host that is cut off is silent, and not "no route"
}
unplug() { ip link del "$1" 2>/dev/null; ip netns del "$1" 2>/dev/null; ip neigh del "$(address "$1")" dev "$BRIDGE" 2>/dev/null; :; }

# ---- a host's control groups: one place in the trees that systemd uses, so that nothing of it can be missed
trees() { awk '$3=="cgroup2"&&!u{u=1;print $2} $3=="cgroup"&&$4~/name=systemd/{print $2}' /proc/self/mounts; }
kill_all() {
  local t i
  for t in $(trees); do
    [ -e "$t/$GROUP/$1/cgroup.kill" ] || continue
    for i in $(seq 100); do grep -q '^populated 0' "$t/$GROUP/$1/cgroup.events" && break; echo 1 >"$t/$GROUP/$1/cgroup.kill"; sleep .03; done
  done
}
no_groups() { local t; for t in $(trees); do find "$t/$GROUP${1:+/$1}" -depth -type d -exec rmdir {} \; 2>/dev/null; done; :; }

# The kernel gives the pid after ns_last_pid, in the name space of who writes it; somebody else may be quicker, so try again.
givepid() {
  local l i; l=$(leader "$1")
  for i in $(seq 50); do
    nsenter -t "$l" -p sh -c "echo $(($2 - 1)) >/proc/sys/kernel/ns_last_pid; exec setsid -f nsenter -t $l -m sleep 600" </dev/null >/dev/null 2>&1
    for _ in 1 2 3 4 5; do
      inside "$1" sh -c "tr '\\0' ' ' </proc/$2/cmdline" 2>/dev/null | grep 'sleep 600' && return 0; sleep .02
    done
  done
  die "pid $2 could not be given"
}

# ---- memory limits, by a control group of our own into which a process of the host is moved. v1: in the machine's memory tree, which is
# mounted in the host, where its processes can read the count. v2: below the host's own group, if the machine has the controller.
memory_tree() { awk '$3=="cgroup"&&$4~/(^|,)memory(,|$)/{print $2;exit}' /proc/self/mounts; }
starved() {
  local m; m=$(memory_tree)
  if [ -n "$m" ]; then find "$m" -type d -name "$GROUP-$1" | head -1; else echo "$(trees | head -1)/$GROUP/$1/starved"; fi
}
hold() {
  local g d l m; l=$(leader "$1"); m=$(memory_tree)
  if [ -n "$m" ]; then  # below the host's own group: its processes see nothing above
    g=$m$(awk -F: '$2~/(^|,)memory(,|$)/{print $3}' "/proc/$l/cgroup")/$GROUP-$1
    inside "$1" sh -c 'mkdir -p /run/memory; mountpoint -q /run/memory || mount -t cgroup -o memory cgroup /run/memory'
  else
    g=$(starved "$1"); for d in "${g%/$GROUP/*}" "${g%/*/starved}" "${g%/starved}"; do echo +memory >"$d/cgroup.subtree_control"; done
  fi
  mkdir -p "$g"
  nsenter -t "$l" -p sh -c "echo $2 >$g/cgroup.procs"  # the pid as the host counts it
}
limit() {  # `used`: what it uses now and 1 MiB; less would be refused
  local g n=$2 i; g=$(starved "$1")
  if [ -e "$g/memory.max" ]; then [ "$n" = used ] && n=$(($(cat "$g/memory.current") + 1048576)); echo "$n" >"$g/memory.max"; return; fi
  [ "$n" = max ] && { echo -1 >"$g/memory.limit_in_bytes"; return; }
  for i in $(seq 20); do echo $(($(cat "$g/memory.usage_in_bytes") + 1048576)) 2>/dev/null >"$g/memory.limit_in_bytes" && return; sleep .05; done
  die "no limit could be set for $1"
}
kills() { cat "$(starved "$1")"/memory.{oom_control,events} 2>/dev/null | awk '$1=="oom_kill"{n=$2} END{print n+0}'; }

# ---- a host
disk() {
  local n=$1 d=$H/$1
  mkdir -p "$d/work" "$d/root"
  [ -d "$d/up" ] || { cp -a "$LAB_DIR/common" "$d/up.new" && mv "$d/up.new" "$d/up"; }
  mountpoint -q "$d/root" || mount -t overlay "mtp-$n" -o "lowerdir=/,upperdir=$d/up,workdir=$d/work" "$d/root" || return 1
  [ -e "$d/hostkey.pub" ] && return 0
  echo "$n" >"$d/root/etc/hostname"
  echo "$n$RANDOM$(date +%s%N)" | md5sum | cut -c1-32 >"$d/root/etc/machine-id"
  ssh-keygen -q -t ed25519 -N '' -C "$n" -f "$d/root/etc/ssh/ssh_host_ed25519_key" </dev/null
  cp "$d/root/etc/ssh/ssh_host_ed25519_key.pub" "$d/hostkey.pub"
}
hardware() {  # in the background for each host: starts it again when it reboots (nspawn exit code 133)
  local n=$1 d=$H/$1 t rc binds=() b
  put_pid "$d/hardware.pid" $$
  for t in $(trees); do mkdir -p "$t/$GROUP/$n" && echo $$ >"$t/$GROUP/$n/cgroup.procs"; done
  for b in ${LAB_BIND:-}; do binds+=("--bind-ro=$b"); done
  while :; do
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 systemd-nspawn --quiet --directory="$d/root" --machine="$n" --boot --register=no --keep-unit \
      --link-journal=no --network-namespace-path="/run/netns/$n" --resolv-conf=off --timezone=off --console=pipe \
      --capability=CAP_NET_ADMIN "${binds[@]}" </dev/null &
    put_pid "$d/nspawn.pid" $!; echo $(($(cat "$d/boots" 2>/dev/null || echo 0) + 1)) >"$d/boots"
    wait $!; rc=$?; rm -f "$d/nspawn.pid"; rmdir "/run/systemd/nspawn/propagate/$n" 2>/dev/null
    [ $rc = 133 ] || break
  done
  rm -f "$d/hardware.pid"
}
start() {
  local n=$1 d=$H/$1
  [ -n "$(pid_of "$d/hardware.pid")" ] && return 0
  kill_all "$n"
  disk "$n" && plug "$n" || die "$n: no disk or no network"
  setsid nohup "$SELF" _hardware "$n" </dev/null >>"$d/console.log" 2>&1 &
}
ready() {
  local n i s
  for n; do
    for i in $(seq 1200); do
      s=$(inside "$n" systemctl is-system-running 2>/dev/null)
      case $s in running|degraded) inside "$n" bash -c 'exec 8<>/dev/tcp/127.0.0.1/22' 2>/dev/null && continue 2;; esac
      sleep .05
    done
    die "$n did not boot (${s:-no answer}); see $H/$n/console.log"
  done
}
halt() { kill_all "$1"; rm -f "$H/$1/hardware.pid" "$H/$1/nspawn.pid"; rmdir "/run/systemd/nspawn/propagate/$1" 2>/dev/null; :; }
remove() {
  local n=$1 d=$H/$1
  halt "$n"; unplug "$n"
  while mountpoint -q "$d/root"; do umount "$d/root" 2>/dev/null || umount -l "$d/root"; done
  rm -rf --one-file-system "$d"; no_groups "$n"; n=$(starved "$n"); [ -z "$n" ] || rmdir "$n" 2>/dev/null; :
}
reboot() {
  local b i; b=$(cat "$H/$1/boots")
  inside "$1" systemctl reboot >/dev/null 2>&1
  for i in $(seq 1200); do [ "$(cat "$H/$1/boots")" != "$b" ] && return 0; sleep .05; done
  die "$1 did not reboot"
}

[ "$(id -u)" = 0 ] || die "run as root"
command=${1:-help}; shift 2>/dev/null
case $command in
  up)
    for t in systemd-nspawn ip nsenter sshd ssh-keygen; do PATH=$PATH:/usr/sbin command -v $t >/dev/null || die "$t is not installed"; done
    mkdir -p "$H"; keys; common; bridge
    names=(); for i in $(seq "$1"); do names+=("$PREFIX$i"); start "$PREFIX$i"; done
    known_hosts; ready "${names[@]}" ;;
  down)
    for n in $(hosts); do remove "$n"; done
    ip link del "$BRIDGE" 2>/dev/null; no_groups ""; ip route del unreachable "$NET.0/24" metric 9999 2>/dev/null
    mountpoint -q "$LAB_DIR/m" && umount "$LAB_DIR/m"; rm -rf --one-file-system "$LAB_DIR" ;;
  reset) remove "$1"; mkdir -p "$H/$1"; start "$1"; known_hosts; ready "$1" ;;
  reboot) reboot "$1"; ready "$1" ;;
  crash) ip link set "$1" down; halt "$1"; unplug "$1"; start "$1"; ready "$1" ;;
  cut) ip link set "$1" down ;;
  heal) ip link set "$1" up ;;
  hold) hold "$@" ;;
  limit) limit "$@" ;;
  kills) kills "$1" ;;
  givepid) givepid "$1" "$2" ;;
  exec) inside "$@" ;;
  _hardware) hardware "$1" ;;
  *) sed -n '2,/^set -u/p' "$SELF" | grep '^#' | sed 's/^# \{0,1\}//' ;;
esac
