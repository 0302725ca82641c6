# Records what hangs.md shows: bash docs/hang.sh PYTHON
# It needs py-spy (pip install py-spy). Long paths are cut, and torchrun's report.
command -v py-spy > /dev/null || { echo 'error: needs py-spy: pip install py-spy' >&2; exit 2; }
python=$1
mkdir -p results
unset PYTHONUNBUFFERED  # so that a line is written in one piece
run="$python -m torch.distributed.run --standalone --nproc-per-node 2 docs/hang.py"
short() { sed -E "s@[^ \"]*/site-packages/@@; s@$PWD/@@; s@^.*\] failed \(exitcode.*@@" | grep -E '^\[rank|^rank|^error'; }
pid_of() { grep -o "rank $1 is process [0-9]*" results/hang.txt | sed 's/.* //'; }  # two may share a line
started_by() { for child in $(pgrep -P "$1"); do echo "$child"; started_by "$child"; done; }

echo '$ torchrun --standalone --nproc-per-node 2 docs/hang.py'
$run 2>&1 | short

echo; echo '$ TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --standalone --nproc-per-node 2 docs/hang.py'
TORCH_DISTRIBUTED_DEBUG=DETAIL $run 2>&1 | short

$run > results/hang.txt 2>&1 &
until [ "$(grep -o 'rank . is process' results/hang.txt | wc -l)" = 2 ]; do sleep 0.2; done
sleep 1
for rank in 0 1; do
  pid=$(pid_of $rank)
  echo; echo "\$ py-spy dump --pid $pid        # rank $rank"
  py-spy dump --pid "$pid" | sed -E 's@ \([^ ]*site-packages/@ (@' | grep -A9 MainThread
done
pid=$(pid_of 0)
before=$(wc -l < results/hang.txt)
kill -USR1 "$pid"; sleep 1
echo; echo "\$ kill -USR1 $pid        # rank 0, on its standard error"
tail -n "+$((before + 1))" results/hang.txt | sed -E "s@\"[^\"]*/site-packages/@\"@; s@\"$PWD/@\"@"
wait

echo; echo '$ make 02_naive_ddp ARGS="--timeout 5", and kill -STOP of rank 1'
make --no-print-directory 02_naive_ddp PYTHON="$python" ARGS="--timeout 5 --no-verify" > results/hang.txt 2>&1 &
until grep -q '^mini model' results/hang.txt; do sleep 0.2; done
sleep 3
for pid in $(started_by $!); do
  if tr '\0' '\n' 2> /dev/null < "/proc/$pid/environ" | grep -qx RANK=1; then stopped=$pid; fi
done
kill -STOP "$stopped"
wait
grep error: results/hang.txt | head -n 1
