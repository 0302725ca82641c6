#!/usr/bin/env bash
# Two "hosts" on one Linux machine: two network namespaces, joined by a network of a chosen rate and
# delay, half of the cores each, one rank on each. Started by `make hosts`; needs no root where the
# kernel lets users make namespaces.
# usage: hosts.sh PYTHON RATE DELAY SCRIPT [flags of the script]
#
# Nothing outlives it, not even after kill -9: the namespaces have no names and end with their
# processes, and those live in a process namespace, which the kernel ends with its first process.
# Three processes stand in a row, and each is killed when the one before it dies: this script as
# make starts it (which hears Ctrl-C), `unshare`, and this script again as that first process.
set -euo pipefail
folder=$(dirname "$0")
PATH=$PATH:/usr/sbin:/sbin  # where ip is, and users do not look

fail() {
  echo "error: $1" >&2
  exit 2
}

as_make_starts_it() {
  "$1" "$folder/link.py" "$2" "$3"  # can it read RATE and DELAY?
  [ -f "$4" ] || fail "SCRIPT='$4' is not a file"
  [ "$(uname)" = Linux ] || fail "make hosts needs Linux: network namespaces"
  for tool in ip taskset unshare nsenter setpriv; do
    command -v $tool > /dev/null ||
      fail "make hosts needs the command $tool (packages iproute2, util-linux)"
  done
  exec setpriv --pdeathsig KILL bash "$0" watch "$@"
}

watch() {
  namespaces="--net --mount --pid --fork --kill-child --mount-proc"
  # shellcheck disable=SC2086  # words
  if ! unshare $namespaces true 2> /dev/null; then
    namespaces="--user --map-root-user $namespaces"
    unshare $namespaces true 2> /dev/null ||
      fail "make hosts needs network namespaces: try as root, this system gives users none"
  fi
  trap 'kill -KILL $! 2> /dev/null || true' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  started=$SECONDS
  # shellcheck disable=SC2086
  setpriv --pdeathsig KILL unshare $namespaces bash "$0" within "$@" &
  wait $!
  echo "make hosts took $((SECONDS - started)) s"
}

on_host() {  # NUMBER COMMAND…
  nsenter --net=/run/host"$1" "${@:2}"
}

torchrun_on_host() {  # NUMBER SCRIPT FLAGS…: one node of torchrun
  number=$1
  shift
  # The hosts have no names: TORCH_CPP_LOG_LEVEL leaves out c10d's complaint about that.
  # No GPU: both would take the same one, past the network that is to be measured.
  GLOO_SOCKET_IFNAME=host$number TORCH_CPP_LOG_LEVEL=ERROR CUDA_VISIBLE_DEVICES='' \
    on_host "$number" taskset -c "${cores[$number]}" \
    "$python" -m tools.torchrun --nnodes 2 --node-rank "$number" --nproc-per-node 1 \
    --master-addr 10.77.0.1 --master-port 29400 "$@"
}

within() {
  python=$1 rate=$2 delay=$3
  shift 3
  mount -t tmpfs tmpfs /run  # seen by these processes only; holds the namespaces of the hosts
  for number in 0 1; do
    touch /run/host$number
    unshare --net mount --bind /proc/self/ns/net /run/host$number
  done

  mkfifo /run/ready
  "$python" "$folder/link.py" "$rate" "$delay" host0 host1 > /run/ready &
  read -r _ < /run/ready || exit 2
  for number in 0 1; do
    ip link set host$number netns /run/host$number
    on_host $number ip link set lo up
    on_host $number ip link set host$number up txqueuelen 5000
    on_host $number ip address add 10.77.0.$((number + 1))/24 dev host$number
    # The same TCP on every machine. It fills the cable; bbr, where it is the default, leaves 7 %.
    on_host $number tee /proc/sys/net/ipv4/tcp_congestion_control <<< reno &> /dev/null || true
  done
  echo "two hosts of one rank each, $rate, $delay from one to the other"
  echo "network: tools/link.py"

  # make compare knows the network, and writes files of its own.
  if [ "$1" = 05_bucketed/compare/compare.py ]; then
    shift
    set -- 05_bucketed/compare/compare.py --label "$rate, $delay" \
      --plot results/hosts.png --json results/hosts.json "$@"
  fi

  count=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # which else says what they say
  half=$((count > 1 ? count / 2 : 1))
  cores=("0-$((half - 1))" "$((count > 1 ? half : 0))-$((count - 1))")
  torchrun_on_host 1 "$@" > /run/output 2>&1 &
  torchrun_on_host 0 "$@" &
  for _ in host host; do
    status=0
    wait -n || status=$?
    [ $status = 0 ] && continue  # the cable never ends by itself: what ends well is a host
    [ $status = 2 ] && exit 2  # a wrong flag: rank 0 has said it
    sed 's/^/host 1: /' /run/output >&2
    echo "error: a host or the network between them has failed" >&2
    exit 1
  done
}

case $1 in
  watch) watch "${@:2}" ;;
  within) within "${@:2}" ;;
  *) as_make_starts_it "$@" ;;
esac
