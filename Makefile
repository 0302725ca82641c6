# DDP, rung by rung. `make` prints what there is; every target sets up what it needs.

NPROC ?= 2
ARGS ?=
N ?= 20
STAGES := 01_allreduce 02_naive_ddp 03_flat_ddp 04_overlap_ddp 05_bucketed 06_sharded_optimizer 07_resnet_ddp 08_ddp_rpc
LADDER := 02_naive_ddp 03_flat_ddp 04_overlap_ddp 05_bucketed
LADDER_SCRIPTS := 02_naive_ddp/naive_ddp.py 03_flat_ddp/flat_ddp.py 04_overlap_ddp/overlap_ddp.py 05_bucketed/bucketed.py
TOOLS := 05_bucketed/bucket_sweep 07_resnet_ddp/sweep 07_resnet_ddp/compile_ddp

ifeq ($(shell expr "x$(NPROC)" : 'x[1-9][0-9]*$$'),0)
$(error NPROC='$(NPROC)' is not a whole number of at least 1)
endif

# PYTHON=python3 uses an interpreter that has torch already; without it a .venv is made from requirements.txt.
ifeq ($(origin PYTHON),undefined)
PYTHON := .venv/bin/python
RUNTIME := .venv/.installed
DEVELOPMENT := .venv/.installed-dev
endif

# One host: a free port, chosen by torchrun. Several hosts: all meet at MASTER_ADDR:MASTER_PORT.
ifdef NNODES
MASTER_PORT ?= 29400
HOSTS = --nnodes $(NNODES) --node-rank $(NODE_RANK) --master-addr $(MASTER_ADDR) --master-port $(MASTER_PORT)
ifeq ($(and $(NODE_RANK),$(MASTER_ADDR)),)
$(error NNODES=$(NNODES) needs NODE_RANK=0, 1, … and MASTER_ADDR=address of the host with NODE_RANK=0 too)
endif
else
HOSTS = --standalone
endif
CORES := $(shell getconf _NPROCESSORS_ONLN)
THREADS := $(shell echo $$(( $(CORES) > $(NPROC) ? $(CORES) / $(NPROC) : 1 )))
TORCHRUN = OMP_NUM_THREADS=$(THREADS) $(PYTHON) -m torch.distributed.run $(HOSTS) --nproc-per-node $(NPROC)

.PHONY: help setup test test-full soak hosts lint all reference clean compare timeline $(STAGES) $(TOOLS)

help:
	@echo 'make STAGE [NPROC=2] [ARGS="--help"]      run a stage; the first run makes .venv (some minutes, 5.5 GB)'
	@echo
	@echo '  make 01_allreduce                       all-reduce, measured and opened up'
	@echo '  make 02_naive_ddp                       one all-reduce per parameter, after backward'
	@echo '  make 03_flat_ddp                        one all-reduce of one flat tensor, after backward'
	@echo '  make 04_overlap_ddp                     one all-reduce per parameter, during backward'
	@echo '  make 05_bucketed                        one all-reduce per bucket, during backward'
	@echo '  make 05_bucketed/bucket_sweep           which bucket size is best, measured and predicted'
	@echo '  make 06_sharded_optimizer               optimizer state split over the ranks (ZeRO stage 1)'
	@echo '  make 07_resnet_ddp                      ResNet-18 on one device against torch DDP on NPROC'
	@echo '  make 07_resnet_ddp/sweep [FULL=1]       iteration time over models and numbers of ranks'
	@echo '  make 07_resnet_ddp/compile_ddp          DDP and FSDP, eager and compiled (ARGS=--matrix: side by side)'
	@echo '  make 08_ddp_rpc                         DDP for the dense part, RPC parameter servers for the embeddings'
	@echo
	@echo '  make compare                            02 to 06 with the same settings: a table, results/compare.png'
	@echo '  make timeline                           a step of 02 to 05 on one time axis: results/timeline.png'
	@echo '  make hosts [RATE=1gbit DELAY=0.2ms]     02 to 05 across two network namespaces (Linux, as root)'
	@echo '  make all                                every stage with its defaults'
	@echo '  make setup                              make .venv from requirements.txt'
	@echo '  make test                               the test suite, the fast part'
	@echo '  make test-full                          all of it: real models, every fault, wrong input of every option'
	@echo '  make soak [N=20]                        the tests with several processes, N times'
	@echo '  make lint                               ruff'
	@echo '  make reference                          record every reference_output*.txt and picture again'
	@echo '  make clean                              remove results/ and caches'
	@echo
	@echo 'NPROC: ranks on this host. PYTHON=python3: an interpreter that has torch, instead of .venv. Several hosts:'
	@echo 'make 05_bucketed NPROC=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 [MASTER_PORT=29400]    (on each host)'

setup: $(RUNTIME)

.venv/.installed: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo 'error: python3 must be 3.10 or newer'; exit 2; }
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/.installed-dev: .venv/.installed requirements-dev.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# 01 and 08 start their ranks by themselves; 02 to 07 are started by torchrun.
01_allreduce: $(RUNTIME) | results
	@$(PYTHON) 01_allreduce/allreduce.py $(ARGS)

02_naive_ddp: SCRIPT = 02_naive_ddp/naive_ddp.py
03_flat_ddp: SCRIPT = 03_flat_ddp/flat_ddp.py
04_overlap_ddp: SCRIPT = 04_overlap_ddp/overlap_ddp.py
05_bucketed: SCRIPT = 05_bucketed/bucketed.py
06_sharded_optimizer: SCRIPT = 06_sharded_optimizer/sharded_optimizer.py
$(LADDER) 06_sharded_optimizer: $(RUNTIME) | results
	@$(TORCHRUN) $(SCRIPT) $(ARGS)

05_bucketed/bucket_sweep: $(RUNTIME) | results
	@$(TORCHRUN) 05_bucketed/bucket_sweep.py --plot results/bucket_sweep.png --json results/bucket_sweep.json $(ARGS)

# One device, then NPROC of them, each process with the same number of threads; the pictures when both are there.
07_resnet_ddp: $(RUNTIME) | results
	@$(PYTHON) 07_resnet_ddp/resnet_ddp.py --threads $(THREADS) $(ARGS)
	@$(TORCHRUN) 07_resnet_ddp/resnet_ddp.py --threads $(THREADS) $(ARGS)

# FULL=1: the models and sizes of PyTorch's own suite.
SMALL = --model resnet18 --batch-size 8 --image-size 64
07_resnet_ddp/sweep: $(RUNTIME) | results
	@$(TORCHRUN) 07_resnet_ddp/sweep.py $(if $(FULL),,$(SMALL)) $(ARGS)

07_resnet_ddp/compile_ddp: $(RUNTIME) | results
	@$(TORCHRUN) 07_resnet_ddp/compile_ddp.py $(ARGS)

LAYOUT = --trainers 2 --servers 2 --embedding-dim 256
08_ddp_rpc: $(RUNTIME) | results
	@$(PYTHON) 08_ddp_rpc/ddp_rpc.py $(if $(findstring --trainers,$(ARGS))$(findstring --servers,$(ARGS)),,$(LAYOUT)) $(ARGS)

# 02 to 06 with the same settings: one table, one picture.
compare: $(RUNTIME) | results
	@for script in $(LADDER_SCRIPTS) 06_sharded_optimizer/sharded_optimizer.py; do \
	  echo "$$script"; name=results/compare_$${script%%/*}; \
	  $(TORCHRUN) $$script --no-verify --steps 12 --json $$name.json $(ARGS) > $$name.txt || exit; \
	done
	@$(PYTHON) -m common.compare $(foreach stage,$(LADDER) 06_sharded_optimizer,results/compare_$(stage).json) \
	  --plot results/compare.png

# One step of 02 to 05 on one time axis, from traces of real runs.
timeline: $(RUNTIME) | results
	@for script in $(LADDER_SCRIPTS); do \
	  name=results/$${script%%/*}; \
	  $(TORCHRUN) $$script --no-verify --no-baseline --steps 1 --trace $$name.json $(ARGS) > $$name.txt || exit; \
	done
	@$(PYTHON) -m common.timeline $(LADDER:%=results/%.json) --plot results/timeline.png

# Linux, as root: 02 to 05 on a network of a chosen rate and delay between two namespaces of this machine.
RATE ?= 1gbit
DELAY ?= 0.2ms
hosts: $(RUNTIME) | results
	@bash common/hosts.sh $(PYTHON) $(RATE) $(DELAY) $(ARGS)

all: $(STAGES)

test: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m pytest -m "not full" $(ARGS)

test-full: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m pytest $(ARGS)

# The tests with several processes, N times over: what fails once in many runs shows here.
soak: $(RUNTIME) $(DEVELOPMENT)
	@for round in $$(seq $(N)); do echo "round $$round of $(N)"; \
	  $(PYTHON) -m pytest -q -m "distributed and not full" $(ARGS) || exit; done

lint: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m ruff check .

reference: $(STAGES:%=%/reference_output.txt) 05_bucketed/reference_output_bucket_sweep.txt \
	05_bucketed/reference_output_three_runs.txt \
	07_resnet_ddp/reference_output_parts.txt 07_resnet_ddp/reference_output_sweep.txt 07_resnet_ddp/reference_output_compile_ddp.txt \
	08_ddp_rpc/reference_output_8x8.txt common/reference_output_compare.txt common/reference_output_timeline.txt

# record FILE, TARGET, ARGS: what the target prints becomes the file, once it has succeeded.
record = $(MAKE) --no-print-directory $(1) ARGS="$(2)" > results/recording.txt && mv results/recording.txt $@
01_allreduce/reference_output.txt: FORCE | results
	$(call record,01_allreduce,--plot 01_allreduce/allreduce.png)
$(LADDER:%=%/reference_output.txt): %/reference_output.txt: FORCE | results
	$(call record,$*,--steps 20)
06_sharded_optimizer/reference_output.txt: FORCE | results
	$(call record,06_sharded_optimizer,--plot 06_sharded_optimizer/memory.png)
07_resnet_ddp/reference_output.txt: FORCE | results
	rm -f results/07_*.json
	$(call record,07_resnet_ddp)
	cp results/comparison.png results/breakdown.png 07_resnet_ddp
# What the README of 07 takes apart: single and DDP in turn at 64 and 224 pixels; half the batch; no all-reduce.
RESNET = 07_resnet_ddp/resnet_ddp.py --threads $(THREADS) --epochs 1 --log-every 1000 --results results/07_parts
07_resnet_ddp/reference_output_parts.txt: FORCE | results
	rm -rf results/07_parts
	@run() { echo "\$$ $$*"; "$$@" && echo; }; \
	{ for pair in 1 2 3; do run $(PYTHON) $(RESNET) && run env $(TORCHRUN) $(RESNET) || exit; done && \
	  for pair in 1 2 3; do run $(PYTHON) $(RESNET) --image-size 224 --steps-per-epoch 4 && \
	                        run env $(TORCHRUN) $(RESNET) --image-size 224 --steps-per-epoch 4 || exit; done && \
	  for size in '--image-size 64 --steps-per-epoch 23' '--image-size 224 --steps-per-epoch 4'; do \
	    run $(PYTHON) $(RESNET) --global-batch 32 $$size && run env $(TORCHRUN) $(RESNET) --no-sync $$size || exit; done; \
	} > results/recording.txt && mv results/recording.txt $@
08_ddp_rpc/reference_output.txt: FORCE | results
	$(call record,08_ddp_rpc)
08_ddp_rpc/reference_output_8x8.txt: FORCE | results
	@for run in 1 2 3; do echo "run $$run"; \
	  $(PYTHON) 08_ddp_rpc/ddp_rpc.py --trainers 8 --servers 8 --lookup both --epochs 20 || exit; \
	done > results/recording.txt && mv results/recording.txt $@
# Three runs each of 04, of 05, and of 05 beside torch DDP without its copy back: the ratios scatter, so take the middle one.
05_bucketed/reference_output_three_runs.txt: FORCE | results
	@for run in 1 2 3; do for stage in 04_overlap_ddp 05_bucketed '05_bucketed ARGS=--gradient-as-bucket-view'; do \
	  set -- $$stage; echo "$$stage, run $$run"; \
	  $(MAKE) --no-print-directory $$1 ARGS="--no-verify --steps 20 $${2#ARGS=}" | grep -E '^(step|no sync|[A-Za-z]+DDP |torch DDP)'; \
	done || exit; done > results/recording.txt && mv results/recording.txt $@
05_bucketed/reference_output_bucket_sweep.txt: FORCE | results
	$(call record,05_bucketed/bucket_sweep)
	cp results/bucket_sweep.png 05_bucketed
07_resnet_ddp/reference_output_sweep.txt: FORCE | results
	$(call record,07_resnet_ddp/sweep)
07_resnet_ddp/reference_output_compile_ddp.txt: FORCE | results
	$(call record,07_resnet_ddp/compile_ddp,--matrix)
common/reference_output_hosts.txt: FORCE | results
	$(call record,hosts)
common/reference_output_compare.txt common/reference_output_timeline.txt: common/reference_output_%.txt: FORCE | results
	$(call record,$*)
	cp results/$*.png common
FORCE:

results:
	mkdir -p results

clean:
	rm -rf results .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
