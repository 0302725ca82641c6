# How every reference_output*.txt and picture is recorded; the Makefile includes this file.

REFERENCES := $(STAGES:%=%/reference_output.txt) \
	01_allreduce/reference_output_three_runs.txt 01_allreduce/reference_output_alternate_ring.txt \
	01_allreduce/reference_output_ring_profile.txt \
	05_bucketed/reference_output_bucket_sweep.txt 05_bucketed/reference_output_three_runs.txt \
	05_bucketed/reference_output_predict.txt 05_bucketed/reference_output_extrapolate.txt \
	06_sharded_optimizer/reference_output_memory.txt \
	06_sharded_optimizer/reference_output_fsdp.txt \
	06_sharded_optimizer/reference_output_fsdp_three_runs.txt \
	06_sharded_optimizer/reference_output_fsdp_timeline.txt \
	07_resnet_ddp/reference_output_parts.txt \
	07_resnet_ddp/reference_output_sweep.txt 07_resnet_ddp/reference_output_sweep_full.txt \
	07_resnet_ddp/reference_output_compile_ddp.txt 07_resnet_ddp/reference_output_variants.txt \
	07_resnet_ddp/reference_output_balance.txt 07_resnet_ddp/reference_output_cifar.txt \
	08_ddp_rpc/reference_output_8x8.txt \
	common/reference_output_compare.txt common/reference_output_timeline.txt \
	common/reference_output_growth.txt
# In the end: which figures of the READMEs the new recordings do not say.
reference: $(REFERENCES)
	@$(PYTHON) -m common.recordings.figures || true

# record TARGET, ARGS: what the target prints becomes the file, once it has succeeded.
keep = results/recording.txt && mv results/recording.txt $@
record = $(MAKE) --no-print-directory $(1) ARGS="$(2)" > $(keep)

# Three runs of the whole grid: the first is shown, and the README quotes the medians of all.
RUNS_OF_01 := $(foreach run,1 2 3,results/01_run$(run).json)
01_allreduce/reference_output.txt: FORCE | results
	for run in 1 2 3; do \
	  $(PYTHON) 01_allreduce/allreduce.py --json results/01_run$$run.json > results/01_run$$run.txt \
	    || exit; \
	done
	grep -v '^written: ' results/01_run1.txt > $(keep)
01_allreduce/reference_output_three_runs.txt: 01_allreduce/reference_output.txt
	$(PYTHON) 01_allreduce/alpha_beta.py $(RUNS_OF_01) --plot 01_allreduce/allreduce.png > $(keep)
01_allreduce/reference_output_alternate_ring.txt 01_allreduce/reference_output_ring_profile.txt: \
01_allreduce/reference_output_%.txt: FORCE | results
	$(PYTHON) 01_allreduce/$*.py > $(keep)

$(LADDER:%=%/reference_output.txt): %/reference_output.txt: FORCE | results
	$(call record,$*,--steps 20)

# Three runs each of 04, of 05, and of 05 beside torch DDP without its copy back: the ratios
# scatter, so take the middle one.
ROWS := ^(step|no sync|[A-Za-z]+DDP |torch DDP)
05_bucketed/reference_output_three_runs.txt: FORCE | results
	@for run in 1 2 3; do \
	  for stage in 04_overlap_ddp 05_bucketed '05_bucketed ARGS=--gradient-as-bucket-view'; do \
	    set -- $$stage; echo "$$stage, run $$run"; \
	    $(MAKE) --no-print-directory $$1 ARGS="--no-verify --steps 20 $${2#ARGS=}" \
	      | grep -E '$(ROWS)'; \
	  done || exit; \
	done > $(keep)

05_bucketed/reference_output_bucket_sweep.txt: FORCE | results
	$(call record,05_bucketed/bucket_sweep)
	cp results/bucket_sweep.png 05_bucketed

# Three runs, because the errors scatter; the picture is the last one's.
05_bucketed/reference_output_predict.txt: FORCE | results
	@for run in 1 2 3; do echo "run $$run"; \
	  $(MAKE) --no-print-directory 05_bucketed/predict ARGS= || exit; echo; \
	done > $(keep)
	cp results/predict.png 05_bucketed
05_bucketed/reference_output_extrapolate.txt: FORCE | results
	$(call record,05_bucketed/extrapolate)
	cp results/extrapolate.png 05_bucketed

06_sharded_optimizer/reference_output.txt: FORCE | results
	$(call record,06_sharded_optimizer)
06_sharded_optimizer/reference_output_memory.txt: FORCE | results
	$(call record,06_sharded_optimizer/memory,--plot 06_sharded_optimizer/memory.png)
06_sharded_optimizer/reference_output_fsdp.txt: FORCE | results
	$(call record,06_sharded_optimizer/fsdp,--plot 06_sharded_optimizer/fsdp.png)
# One step on a time axis, with prefetch and without.
FSDP_TRACE = --no-verify --no-memory --no-baseline --steps 2 --warmup 3 --trace
06_sharded_optimizer/reference_output_fsdp_timeline.txt: FORCE | results
	$(MAKE) --no-print-directory 06_sharded_optimizer/fsdp ARGS="$(FSDP_TRACE) results/prefetch.json"
	$(MAKE) --no-print-directory 06_sharded_optimizer/fsdp \
	  ARGS="--no-prefetch $(FSDP_TRACE) results/no_prefetch.json"
	$(PYTHON) -m common.ladder.timeline results/prefetch.json results/no_prefetch.json \
	  --plot 06_sharded_optimizer/fsdp_timeline.png > $(keep)
# Three runs, because the ratios scatter: take the middle one.
FSDP_ROWS := ^(run|step,|no sync|torch|FSDP)
06_sharded_optimizer/reference_output_fsdp_three_runs.txt: FORCE | results
	@for run in 1 2 3; do echo "run $$run"; \
	  $(MAKE) --no-print-directory 06_sharded_optimizer/fsdp ARGS="--no-verify --no-memory" \
	    | grep -E '$(FSDP_ROWS)' || exit; \
	done > $(keep)

07_resnet_ddp/reference_output.txt: FORCE | results
	$(call record,07_resnet_ddp)
	cp results/speedup.png results/breakdown.png 07_resnet_ddp

# What the README of 07 takes apart: single and DDP in turn at 64 and 224 pixels; half the batch;
# no all-reduce.
RESNET = 07_resnet_ddp/resnet_ddp.py --threads $(THREADS) --epochs 1 --log-every 1000 \
	--results results/07_parts
LARGE = --image-size 224 --steps-per-epoch 4
07_resnet_ddp/reference_output_parts.txt: FORCE | results
	rm -rf results/07_parts
	@run() { echo "\$$ $$*"; "$$@" && echo; }; \
	{ for pair in 1 2 3; do run $(PYTHON) $(RESNET) && run env $(TORCHRUN) $(RESNET) || exit; done; \
	  for pair in 1 2 3; do \
	    run $(PYTHON) $(RESNET) $(LARGE) && run env $(TORCHRUN) $(RESNET) $(LARGE) || exit; \
	  done; \
	  for size in '--image-size 64 --steps-per-epoch 23' '$(LARGE)'; do \
	    run $(PYTHON) $(RESNET) --global-batch 32 $$size && \
	    run env $(TORCHRUN) $(RESNET) --no-sync $$size || exit; \
	  done; \
	} > $(keep)

07_resnet_ddp/reference_output_sweep.txt: FORCE | results
	$(call record,07_resnet_ddp/sweep)
# The benchmark's four models and 224 pixels; fewer images and steps than its 32 and 10.
07_resnet_ddp/reference_output_sweep_full.txt: FORCE | results
	$(MAKE) --no-print-directory 07_resnet_ddp/sweep FULL=1 \
	  ARGS="--batch-size 2 --steps 3 --warmup 1" > $(keep)
07_resnet_ddp/reference_output_compile_ddp.txt: FORCE | results
	$(call record,07_resnet_ddp/compile_ddp)
07_resnet_ddp/reference_output_variants.txt: FORCE | results
	$(call record,07_resnet_ddp/compile_ddp,--variants --batch-size 8 --steps 6)
07_resnet_ddp/reference_output_balance.txt: FORCE | results
	$(call record,07_resnet_ddp/balance,--slow-rank 1 --slow-factor 1.5)

# Of CIFAR-10's size and format: loading alone; then a few steps at 224 pixels, single and DDP, with
# and without workers.
CIFAR = 07_resnet_ddp/resnet_ddp.py --threads $(THREADS) --data results/cifar --image-size 224 \
	--epochs 1 --steps-per-epoch 3 --held-out 64 --log-every 1000
07_resnet_ddp/reference_output_cifar.txt: FORCE | results
	@run() { echo "\$$ $$*"; "$$@" && echo; }; \
	{ run $(PYTHON) 07_resnet_ddp/make_cifar.py results/cifar && \
	  run $(PYTHON) 07_resnet_ddp/loading.py --data results/cifar --image-size 32 224 && \
	  for workers in 0 2; do \
	    run $(PYTHON) $(CIFAR) --workers $$workers && \
	    run $(TORCHRUN) $(CIFAR) --workers $$workers || exit; \
	  done; \
	} > $(keep)

08_ddp_rpc/reference_output.txt: FORCE | results
	$(call record,08_ddp_rpc)
08_ddp_rpc/reference_output_8x8.txt: FORCE | results
	@for run in 1 2 3; do echo "run $$run"; \
	  $(PYTHON) 08_ddp_rpc/ddp_rpc.py --trainers 8 --servers 8 --lookup both --steps 200 || exit; \
	done > $(keep)

common/reference_output_compare.txt: FORCE | results
	$(call record,compare)
	cp results/compare.png common
# All rungs below a step without synchronization; in each rung's folder the rung alone below it.
common/reference_output_timeline.txt: FORCE | results
	$(call record,timeline)
	cp results/timeline.png common
	for stage in $(LADDER); do \
	  $(PYTHON) -m common.ladder.timeline results/timeline_no_sync.json results/timeline_$$stage.json \
	    --plot $$stage/timeline.png || exit; \
	done
common/reference_output_growth.txt: FORCE | results
	$(call record,growth)

# These need Linux, and are not among REFERENCES: the rungs on three networks, the sweep of 07 on two
# hosts, the bucket sweep on the slowest of the three, and the prediction on two.
common/reference_output_hosts.txt: common/reference_output_compare.txt FORCE | results
	$(MAKE) --no-print-directory hosts RATE=4gbit DELAY=0 ARGS="--json results/4gbit.json"
	$(MAKE) --no-print-directory hosts RATE=1gbit DELAY=1ms ARGS="--json results/1gbit.json"
	$(PYTHON) -m common.ladder.networks loopback=results/compare.json "4 Gbit/s"=results/4gbit.json \
	  "1 Gbit/s and 1 ms"=results/1gbit.json --plot common/hosts.png > $(keep)
07_resnet_ddp/reference_output_sweep_hosts.txt: FORCE | results
	$(MAKE) --no-print-directory hosts SCRIPT=07_resnet_ddp/sweep.py \
	  ARGS="--model resnet18 --batch-size 8 --image-size 64" > $(keep)
05_bucketed/reference_output_bucket_sweep_1gbit.txt: FORCE | results
	$(MAKE) --no-print-directory hosts RATE=1gbit DELAY=1ms SCRIPT=05_bucketed/bucket_sweep.py \
	  ARGS="--plot 05_bucketed/bucket_sweep_1gbit.png" > $(keep)
# Three runs on each: about half an hour. The quicker network needs more steps, because its steps
# scatter more.
PREDICT_HOSTS = $(MAKE) --no-print-directory hosts SCRIPT=05_bucketed/predict.py
05_bucketed/reference_output_predict_hosts.txt: FORCE | results
	@for run in 1 2 3; do echo "run $$run"; \
	  $(PREDICT_HOSTS) RATE=4gbit DELAY=0 ARGS='--steps 8' && echo && \
	  $(PREDICT_HOSTS) RATE=1gbit DELAY=1ms ARGS='--steps 5 --warmup 1' || exit; \
	  echo; \
	done > $(keep)

FORCE:
