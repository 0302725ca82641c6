# How every reference_output*.txt and picture is recorded; the Makefile includes this file.
ONE_RUN := $(filter-out 05_bucketed/predict/%,$(LESSONS:%=%/reference_output.txt)) \
	07_resnet_ddp/compile_ddp/reference_output_variants.txt \
	07_resnet_ddp/sweep/reference_output_full.txt
RECORDED := $(wildcard 0?_*/reference_output*.txt 0?_*/*/reference_output*.txt common/*/*.txt)
# Those on two hosts need Linux, the one of hangs.md needs py-spy: name them. In the end: which figures of the READMEs are stale.
reference: $(sort $(ONE_RUN) $(filter-out %_hosts.txt %_1gbit.txt %_hang.txt,$(RECORDED)))
	@$(PYTHON) -m common.recordings.figures || true
results: ; mkdir -p $@
FORCE:

# What is printed becomes the target once all has succeeded, without the names of files and where
# this machine's Python is.
keep = results/recording.txt && grep -v '^written: ' results/recording.txt | \
  sed 's@^$$ [^ ]*/python @$$ python @' > $@
RUN = $(MAKE) --no-print-directory

$(ONE_RUN): FORCE | results
	$(RUN) $(@D) ARGS="$(FLAGS)" > $(keep)
	$(if $(PICTURES),cp $(PICTURES:%=results/%) $(@D))
$(LADDER:%=%/reference_output.txt): FLAGS = --steps 20
05_bucketed/bucket_sweep/reference_output.txt: PICTURES = bucket_sweep.png
06_sharded_optimizer/fsdp/reference_output.txt: PICTURES = fsdp.png
07_resnet_ddp/reference_output.txt: PICTURES = speedup.png
07_resnet_ddp/compile_ddp/reference_output_variants.txt: FLAGS = --variants --batch-size 8 --steps 6
07_resnet_ddp/sweep/reference_output_full.txt: FLAGS = --full --batch-size 2 --steps 3 --warmup 1

# What scatters is run three times: take the middle one.
three_runs = @for run in 1 2 3; do echo "run $$run"; $(1) || exit; done > $(keep)
05_bucketed/reference_output_three_runs.txt: FORCE | results
	$(call three_runs,$(RUN) 04_overlap_ddp ARGS="--no-verify --steps 20" && \
	  $(RUN) 05_bucketed ARGS="--no-verify --steps 20" && \
	  $(RUN) 05_bucketed ARGS="--no-verify --steps 20 --gradient-as-bucket-view")
05_bucketed/predict/reference_output.txt: FORCE | results
	$(call three_runs,$(RUN) $(@D) ARGS="--plot $(@D)/predict.png" && echo)
06_sharded_optimizer/fsdp/reference_output_three_runs.txt: FORCE | results
	$(call three_runs,$(RUN) $(@D) ARGS="--no-verify --no-memory")
06_sharded_optimizer/fsdp/reference_output_accounting.txt: FORCE | results
	for size in xl 10b; do $(RUN) $(@D) ARGS="--accounting --size $$size" || exit; done > $(keep)
08_ddp_rpc/reference_output_8x8.txt: FORCE | results
	$(call three_runs,$(RUN) $(@D) NPROC=8 ARGS="--lookup both --steps 200")
RESNET = 07_resnet_ddp/resnet_ddp.py --threads $(THREADS) --results results/07_parts --epochs 1
07_resnet_ddp/reference_output_parts.txt: FORCE | results
	$(call three_runs,for size in "64 --steps-per-epoch 23" "224 --steps-per-epoch 4"; do \
	  run() { echo "\$$ $$* $$size"; "$$@" --log-every 1000 --image-size $$size && echo; }; \
	  run $(PYTHON) $(RESNET) && run $(TORCHRUN) $(RESNET) && \
	  run $(PYTHON) $(RESNET) --global-batch 32 && run $(TORCHRUN) $(RESNET) --no-sync || exit; \
	done)

JPEGS = --data synthetic --decode 500 --steps-per-epoch 12 --held-out 64 --log-every 1000
07_resnet_ddp/reference_output_loading.txt: FORCE | results
	$(call three_runs,for workers in 0 1 2 4; do \
	  run() { echo "\$$ $$* $(JPEGS) --workers $$workers"; "$$@" $(JPEGS) --workers $$workers && echo; }; \
	  run $(PYTHON) $(RESNET) && run $(TORCHRUN) $(RESNET) || exit; \
	done)

01_allreduce/shared_memory/reference_output_three_runs.txt: FORCE | results
	$(call three_runs,$(RUN) $(@D) ARGS="--plot $(@D)/shared_memory.png")
01_allreduce/shared_memory/reference_output_backend.txt: FORCE | results
	$(call three_runs,$(RUN) compare BACKEND=shared ARGS="--plot $(@D)/backend.png" && \
	  $(RUN) 06_sharded_optimizer/fsdp BACKEND=shared ARGS="--no-verify --no-memory")
05_bucketed/predict/reference_output_extrapolate.txt: FORCE | results
	$(PYTHON) $(@D)/extrapolate.py --plot $(@D)/extrapolate.png > $(keep)
common/ladder/reference_output_compare.txt: FORCE | results
	$(RUN) compare ARGS="--plot $(@D)/compare.png" > $(keep)

# One step on a time axis: FSDP with prefetch and without; all rungs, and each one in its folder.
DRAW = $(PYTHON) -m common.ladder.timeline
TRACE = --no-verify --no-memory --no-baseline --steps 2 --warmup 3 --trace
06_sharded_optimizer/fsdp/reference_output_timeline.txt: FORCE | results
	$(RUN) $(@D) ARGS="$(TRACE) results/prefetch.json"
	$(RUN) $(@D) ARGS="--no-prefetch $(TRACE) results/no_prefetch.json"
	$(DRAW) results/prefetch.json results/no_prefetch.json --plot $(@D)/fsdp_timeline.png > $(keep)
common/ladder/reference_output_timeline.txt: FORCE | results
	$(RUN) timeline ARGS= > $(keep)
	cp results/timeline.png $(@D)
	for stage in $(LADDER); do $(DRAW) results/timeline_no_sync.json \
	  results/timeline_$$stage.json --plot $$stage/timeline.png \
	  --as-long-as results/timeline_0*.json || exit; done

common/docs/reference_output_hang.txt: FORCE | results
	bash common/docs/hang.sh $(PYTHON) > $(keep)

FAST := RATE=4gbit DELAY=0
SLOW := RATE=1gbit DELAY=1ms
common/ladder/reference_output_hosts.txt: common/ladder/reference_output_compare.txt
	$(RUN) compare BACKEND=shared ARGS="--json results/shared.json --no-plot"
	$(RUN) hosts $(FAST) ARGS="--json results/fast.json"
	$(RUN) hosts $(SLOW) ARGS="--json results/slow.json"
	$(PYTHON) -m common.ladder.compare "shared memory"=results/shared.json \
	  loopback=results/compare.json "4 Gbit/s"=results/fast.json "1 Gbit/s, 1 ms"=results/slow.json \
	  --plot $(@D)/hosts.png > $(keep)
LARGE = --size 0.5b --batch-size 1 --context-length 128 --steps 3 --warmup 2
05_bucketed/bucket_sweep/reference_output_large.txt: FORCE | results
	$(RUN) $(@D) ARGS="$(LARGE) --bucket-sizes-mb 1,10,100,1000 \
	  --plot $(@D)/bucket_sweep_large.png" > $(keep)
05_bucketed/bucket_sweep/reference_output_1gbit.txt: FORCE | results
	$(RUN) hosts $(SLOW) SCRIPT=$(@D)/bucket_sweep.py \
	  ARGS="--plot $(@D)/bucket_sweep_1gbit.png" > $(keep)
05_bucketed/predict/reference_output_hosts.txt: FORCE | results
	$(call three_runs,$(RUN) hosts $(FAST) SCRIPT=$(@D)/predict.py ARGS="--no-plot --steps 8" && \
	  $(RUN) hosts $(SLOW) SCRIPT=$(@D)/predict.py ARGS="--no-plot --steps 5 --warmup 1")
07_resnet_ddp/sweep/reference_output_hosts.txt: FORCE | results
	$(RUN) hosts SCRIPT=$(@D)/sweep.py ARGS= > $(keep)
