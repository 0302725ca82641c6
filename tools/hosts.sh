#!/usr/bin/env bash
# Two "hosts" on one Linux machine: two network namespaces, half of the cores for each, one rank on
# each. The kernel (tc) limits the rate between them and, if it has netem, delays what is sent.
# `make hosts` starts it.
# usage: hosts.sh PYTHON RATE DELAY SCRIPT [flags of the script]      (DELAY may be empty)
#
# Nothing outlives it, not even kill -9 of make: each process here is killed when the one before it
# dies, and the last is the first of a process namespace, which the kernel ends with it.
set -euo pipefail
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

within() {
  python=$1 rate=$2 delay=$3
  unshare --net sleep infinity &
  host1=$!
  until [ "$(readlink /proc/$host1/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do
    sleep 0.01
  done
  ip link add name host0 type veth peer name host1 netns $host1
  for number in 0 1; do
    on_host $number ip link set lo up
    on_host $number ip link set host$number up
    on_host $number ip address add 10.77.0.$((number + 1))/24 dev host$number
    on_host $number tc qdisc add dev host$number root handle 1: \
      tbf rate "$rate" burst 128k latency 50ms 2> /dev/null ||
      fail "RATE='$rate' is no rate of tc, such as 1gbit, or this kernel has no tbf"
    [ -z "$delay" ] || on_host $number tc qdisc add dev host$number parent 1: \
      netem delay "$delay" limit 10000 2> /dev/null ||
      fail "DELAY='$delay' is no time of tc, such as 1ms, or this kernel has no netem"
  done
  congestion_control=$(cat /proc/sys/net/ipv4/tcp_congestion_control)
  echo "TCP ($congestion_control) between two hosts: $rate${delay:+, $delay}"
  torchrun_on_host 1 "${@:4}" &
  torchrun_on_host 0 "${@:4}" &
  wait -n && wait -n  # what fails first ends all
}

case $1 in
  watch) watch "${@:2}" ;;
  within) within "${@:2}" ;;
  *) as_make_starts_it "$@" ;;
esac
