#!/usr/bin/env bash
# Two "hosts" on one Linux machine: two network namespaces, half of the cores for each, one rank on
# each. A cable whose rate the kernel limits (tc) joins them; with a DELAY it is tools/cable.py.
# `make hosts` starts it.
# usage: hosts.sh PYTHON RATE DELAY SCRIPT [flags of the script]      (DELAY may be empty)
#
# Nothing outlives it, not even kill -9 of make: each process here is killed when the one before it
# dies, and the last is the first of a process namespace, which the kernel ends with it.
set -euo pipefail
# cable.py takes time of the ranks' cores, so with it all is so many times slower: rate, delay, and
# a step's computing, which takes a batch so many times as large.
dilation=4
PATH=$PATH:/usr/sbin:/sbin  # where ip and tc are, and users do not look

fail() {
  echo "error: $1" >&2
  exit 2
}

as_make_starts_it() {
  [ "$(uname)" = Linux ] || fail "make hosts needs Linux: network namespaces"
  for tool in ip tc taskset unshare nsenter setpriv; do
    command -v $tool > /dev/null ||
      fail "make hosts needs the command $tool (packages iproute2, util-linux)"
  done
  exec setpriv --pdeathsig KILL bash "$0" watch "$@"
}

watch() {  # hears Ctrl-C and SIGTERM, which unshare does not
  namespaces=(--net --mount --pid --fork --kill-child --mount-proc)
  unshare "${namespaces[@]}" true 2> /dev/null || namespaces+=(--user --map-root-user)
  unshare "${namespaces[@]}" true 2> /dev/null ||
    fail "make hosts needs network namespaces: try as root, this system gives users none"
  trap 'kill -KILL $! 2> /dev/null || true' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  setpriv --pdeathsig KILL unshare "${namespaces[@]}" bash "$0" within "$@" &
  wait $!
}

on_host() {  # NUMBER COMMAND…
  if [ "$1" = 0 ]; then "${@:2}"; else nsenter --net="/proc/$host1/ns/net" "${@:2}"; fi
}

cores_of_host() {  # NUMBER: its half of the cores that may be used here, as taskset takes them
  "$python" -c "import os
cores = sorted(os.sched_getaffinity(0))
middle = len(cores) // 2
print(*[cores[:middle] or cores, cores[middle:]][$1], sep=',')"
}

torchrun_on_host() {  # NUMBER SCRIPT FLAGS…: one node of torchrun
  # The hosts have no names: TORCH_CPP_LOG_LEVEL leaves out c10d's complaint about that.
  # No GPU: both would take the same one, past the network that is to be measured.
  GLOO_SOCKET_IFNAME=host$1 TORCH_CPP_LOG_LEVEL=ERROR CUDA_VISIBLE_DEVICES='' \
    on_host "$1" taskset -c "$(cores_of_host "$1")" "$python" -m tools.torchrun --nnodes 2 \
    --node-rank "$1" --nproc-per-node 1 --master-addr 10.77.0.1 --master-port 29400 "${@:2}"
}

join_by_kernel() {
  ip link add name host0 type veth peer name host1 netns $host1
  for number in 0 1; do
    on_host $number tc qdisc add dev host$number root \
      tbf rate "$rate" burst 128k latency 50ms 2> /dev/null ||
      fail "RATE='$rate' is no rate of tc, such as 1gbit, or this kernel has no tbf"
  done
  echo "TCP ($(cat /proc/sys/net/ipv4/tcp_congestion_control)) between two hosts: $rate"
}

join_by_cable() {
  for number in 0 1; do
    on_host $number ip tuntap add host$number mode tun 2> /dev/null ||
      fail "make hosts DELAY=$delay needs /dev/net/tun, and the right to use it: try as root"
    on_host $number ip link set host$number mtu 65000
  done
  on_host 1 "$python" tools/cable.py "$rate" "$delay" $dilation <> /dev/net/tun &
}

within() {
  python=$1 rate=$2 delay=$3
  unshare --net sleep infinity &
  host1=$!
  until [ "$(readlink /proc/$host1/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do
    sleep 0.01
  done
  if [ -n "$delay" ]; then join_by_cable; else join_by_kernel; fi
  for number in 0 1; do
    on_host $number ip link set lo up
    on_host $number ip link set host$number up
    on_host $number ip address add 10.77.0.$((number + 1))/24 dev host$number
  done
  mkdir -p results
  set -- "$4" --label "hosts, $rate${delay:+, $delay}" --plot results/hosts.png \
    --json results/hosts.json ${delay:+--batch-size $((10 * dilation)) --pace 0} "${@:5}"
  torchrun_on_host 1 "$@" &
  torchrun_on_host 0 "$@" &
  wait -n && wait -n  # what fails first ends all
}

case $1 in
  watch) watch "${@:2}" ;;
  within) within "${@:2}" ;;
  *) as_make_starts_it "$@" ;;
esac
