#!/usr/bin/env bash
# The ladder across two "hosts" on one Linux machine: two network namespaces joined by a veth pair
# of a chosen rate and delay, half of the cores each, one rank on each. Started by `make hosts`;
# removes everything again, also after a failure.
# usage: hosts.sh PYTHON RATE DELAY [flags of the stages]
set -euo pipefail
python=$1 rate=$2 delay=$3
shift 3

[ "$(uname)" = Linux ] || { echo "error: make hosts needs Linux: network namespaces" >&2; exit 2; }
[ "$(id -u)" = 0 ] ||
  { echo "error: make hosts needs root, to make network namespaces" >&2; exit 2; }
for tool in ip tc taskset; do
  command -v $tool > /dev/null && continue
  echo "error: make hosts needs the command $tool (packages iproute2, util-linux)" >&2
  exit 2
done

hosts=("ddp$$-0" "ddp$$-1")
cleanup() {
  for host in "${hosts[@]}"; do
    ip netns pids "$host" 2> /dev/null | xargs -r kill -9
    ip netns delete "$host" 2> /dev/null || true
  done
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for host in "${hosts[@]}"; do ip netns add "$host"; done
ip link add eth0 netns "${hosts[0]}" type veth peer name eth0 netns "${hosts[1]}"
for number in 0 1; do
  host=${hosts[$number]}
  ip -n "$host" address add 10.77.0.$((number + 1))/24 dev eth0
  ip -n "$host" link set lo up
  ip -n "$host" link set eth0 up
  tc -n "$host" qdisc add dev eth0 root handle 1: tbf rate "$rate" burst 1mb latency 50ms || {
    echo "error: RATE='$rate' is not a rate that tc understands, such as 1gbit or 200mbit" >&2
    exit 2
  }
  tc -n "$host" qdisc add dev eth0 parent 1: netem delay "$delay" limit 100000 2> /dev/null ||
    refused=yes
done
[ -z "${refused:-}" ] || delay="none (tc refuses DELAY='$delay', or this kernel has no netem)"
echo "two hosts of one rank each, rate $rate, delay $delay"

half=$(($(nproc) > 1 ? $(nproc) / 2 : 1))
cores=("0-$((half - 1))" "$(($(nproc) > 1 ? half : 0))-$(($(nproc) - 1))")
on_host() {  # NUMBER SCRIPT FLAGS…: one node of torchrun
  number=$1
  shift
  # The hosts have no names: TORCH_CPP_LOG_LEVEL leaves out c10d's complaint about that.
  GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=$half TORCH_CPP_LOG_LEVEL=ERROR \
    exec ip netns exec "${hosts[$number]}" taskset -c "${cores[$number]}" \
    "$python" -m torch.distributed.run --nnodes 2 --node-rank "$number" --nproc-per-node 1 \
    --master-addr 10.77.0.1 --master-port 29400 "$@"
}

results=()
for script in 02_naive_ddp/naive_ddp.py 03_flat_ddp/flat_ddp.py \
  04_overlap_ddp/overlap_ddp.py 05_bucketed/bucketed.py; do
  name=results/hosts_${script%%/*}
  echo "$script"
  (on_host 1 "$script" --no-verify --steps 16 --warmup 3 "$@" > "$name.1.txt" 2>&1) &
  (on_host 0 "$script" --no-verify --steps 16 --warmup 3 --json "$name.json" "$@") > "$name.0.txt"
  wait $!
  results+=("$name.json")
done
"$python" -m common.compare "${results[@]}" --plot results/hosts.png
