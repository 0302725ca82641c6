## make STAGE [NPROC=2] [ARGS="--help"]     run a stage; the first run makes .venv (minutes, 5.5 GB)
##
NPROC ?= 2
ARGS ?=
N ?= 20
LADDER := 02_naive_ddp 03_flat_ddp 04_overlap_ddp 05_bucketed
STAGES := 01_allreduce $(LADDER) 06_sharded_optimizer 07_resnet_ddp 08_ddp_rpc
TOOLS := 05_bucketed/bucket_sweep 05_bucketed/predict 06_sharded_optimizer/memory \
	06_sharded_optimizer/fsdp 07_resnet_ddp/sweep 07_resnet_ddp/compile_ddp 07_resnet_ddp/balance

ifeq ($(shell expr "x$(NPROC)" : 'x[1-9][0-9]*$$'),0)
$(error NPROC='$(NPROC)' is not a whole number of at least 1)
endif

# PYTHON=python3 uses an interpreter that has torch; without it a .venv is made.
ifeq ($(origin PYTHON),undefined)
PYTHON := .venv/bin/python
RUNTIME := .venv/.installed
READER := python3
DEVELOPMENT := .venv/.installed-dev
else
override PYTHON := "$(PYTHON)"
READER := $(PYTHON)
RUNTIME := check-python
endif

# One host: a free port, chosen by torchrun. Several hosts: all meet at MASTER_ADDR:MASTER_PORT.
ifdef NNODES
MASTER_PORT ?= 29400
MEETING = --master-addr $(MASTER_ADDR) --master-port $(MASTER_PORT)
HOSTS = --nnodes $(NNODES) --node-rank $(NODE_RANK) $(MEETING)
ifeq ($(and $(NODE_RANK),$(MASTER_ADDR)),)
$(error NNODES=$(NNODES) needs NODE_RANK=0, 1, … and MASTER_ADDR=address of the host with 0 too)
endif
else
HOSTS = --standalone
endif
CORES := $(shell getconf _NPROCESSORS_ONLN)
THREADS := $(shell echo $$(( $(CORES) > $(NPROC) ? $(CORES) / $(NPROC) : 1 )))
TORCHRUN = $(PYTHON) -m common.torchrun $(HOSTS) \
	--nproc-per-node $(NPROC)

HELP := $(filter -h --help,$(ARGS))

.NOTPARALLEL:
.PHONY: help setup test test-full test-torch clean-torch soak hosts lint format all reference clean compare growth timeline \
	read check-python $(STAGES) $(TOOLS) 05_bucketed/simulate 05_bucketed/extrapolate \
	07_resnet_ddp/compare_runs 07_resnet_ddp/make_cifar 07_resnet_ddp/loading \
	01_allreduce/alternate_ring 01_allreduce/ring_profile
help:
	@sed -n 's/^## \{0,1\}//p' Makefile

# make 05 and make 05_bucketed/ are make 05_bucketed.
SHORT = $(firstword $(subst _, ,$(1)))
$(foreach stage,$(STAGES),$(eval .PHONY: $(call SHORT,$(stage)) $(stage)/) \
	$(eval $(call SHORT,$(stage)) $(stage)/: $(stage)))

##   make 01_allreduce                       all-reduce, measured and opened up
GIVEN := $(filter command environment,$(firstword $(origin NPROC)))
DRAW = $(if $(filter --demo --plot --plot=% -h --help,$(ARGS)),,--plot results/$(1).png)
01_allreduce: $(RUNTIME) | $(if $(call DRAW),results)
	@$(PYTHON) 01_allreduce/allreduce.py $(if $(GIVEN),--world-sizes $(NPROC)) \
	  $(call DRAW,01_allreduce) $(ARGS)

##   make 01_allreduce/alternate_ring        a simpler ring, beside the ring
##   make 01_allreduce/ring_profile          where the ring's time goes
##   make 02_naive_ddp                       one all-reduce per parameter, after backward
##   make 03_flat_ddp                        one all-reduce of one flat tensor, after backward
##   make 04_overlap_ddp                     one all-reduce per parameter, during backward
##   make 05_bucketed                        one all-reduce per bucket, during backward
SCRIPT_OF_02_naive_ddp := 02_naive_ddp/naive_ddp.py
SCRIPT_OF_03_flat_ddp := 03_flat_ddp/flat_ddp.py
SCRIPT_OF_04_overlap_ddp := 04_overlap_ddp/overlap_ddp.py
SCRIPT_OF_05_bucketed := 05_bucketed/bucketed.py
##   make 05_bucketed/bucket_sweep           which bucket size is best, measured and predicted
##   make 05_bucketed/simulate               a step of 02 to 05 by a model, without running one
##   make 05_bucketed/predict                what that model predicts here, and what is measured
##   make 05_bucketed/extrapolate            the model for 2 to 1024 ranks
##   make 06_sharded_optimizer               optimizer state split over the ranks (ZeRO stage 1)
##   make 06_sharded_optimizer/memory        what that saves, part by part
##   make 06_sharded_optimizer/fsdp          gradients and parameters split too (ZeRO stage 3)
SCRIPT_OF_06_sharded_optimizer := 06_sharded_optimizer/sharded_optimizer.py
$(LADDER) 06_sharded_optimizer: $(RUNTIME)
	@$(TORCHRUN) $(SCRIPT_OF_$@) $(ARGS)

##   make 07_resnet_ddp                      ResNet-18 on one device against torch DDP on NPROC
##   make 07_resnet_ddp/compare_runs         its table and pictures again
##   make 07_resnet_ddp/sweep [FULL=1]       iteration time over models and numbers of ranks
##   make 07_resnet_ddp/compile_ddp          DDP and FSDP, eager and compiled
##   make 07_resnet_ddp/balance              the slowest rank sets the pace
##   make 07_resnet_ddp/make_cifar           a synthetic CIFAR-10 of full size: results/cifar
##   make 07_resnet_ddp/loading              what loading it costs, with and without workers
# Every process has the same number of threads, also the single one. The flags are checked for all
# ranks before it starts.
RESNET_DDP = 07_resnet_ddp/resnet_ddp.py --threads $(THREADS) --results results $(ARGS)
RANKS = $$(( $(NPROC) * $(or $(NNODES),1) ))
AS_RANK_0 = RANK=0 LOCAL_RANK=0 WORLD_SIZE=$(RANKS) LOCAL_WORLD_SIZE=$(NPROC)
07_resnet_ddp: $(RUNTIME) | results
	@$(AS_RANK_0) $(PYTHON) $(RESNET_DDP) --check
ifeq ($(HELP),)
	@rm -f results/07_single.json results/07_ddp_*.json results/speedup.png results/breakdown.png
	@echo "1 of 2: a single device"; began=$$(date +%s); $(PYTHON) $(RESNET_DDP) || exit; \
	  echo; echo "2 of 2: DDP × $(RANKS) (1 took $$(( $$(date +%s) - began )) s)"; \
	  $(TORCHRUN) $(RESNET_DDP)
endif
01_allreduce/alternate_ring 01_allreduce/ring_profile 05_bucketed/simulate: $(RUNTIME)
	@$(PYTHON) $@.py $(ARGS)
05_bucketed/extrapolate: $(RUNTIME) | $(if $(call DRAW),results)
	@$(PYTHON) $@.py $(call DRAW,extrapolate) $(ARGS)
07_resnet_ddp/compare_runs: $(RUNTIME)
	@$(PYTHON) $@.py $(or $(ARGS),results)
07_resnet_ddp/make_cifar: $(RUNTIME) | results
	@$(PYTHON) $@.py $(or $(ARGS),results/cifar)
07_resnet_ddp/loading: $(RUNTIME)
	@$(PYTHON) $@.py $(ARGS)

# The second scripts of the folders, which torchrun starts as well.
05_bucketed/bucket_sweep: FLAGS = $(call DRAW,bucket_sweep)
05_bucketed/predict: FLAGS = $(call DRAW,predict)
06_sharded_optimizer/memory: FLAGS = $(call DRAW,06_memory)
06_sharded_optimizer/fsdp: FLAGS = $(if $(filter --no-memory,$(ARGS)),,$(call DRAW,06_fsdp))
05_bucketed/bucket_sweep 05_bucketed/predict 06_sharded_optimizer/memory \
06_sharded_optimizer/fsdp: | $(if $(call DRAW),results)
07_resnet_ddp/sweep: FLAGS = $(if $(FULL),,--model resnet18 --batch-size 8 --image-size 64)
$(TOOLS): $(RUNTIME)
	@$(TORCHRUN) $@.py $(FLAGS) $(ARGS)

##   make 08_ddp_rpc                         DDP for the dense part, RPC servers for the embeddings
LAYOUT = --trainers $(NPROC) --servers $(NPROC)
LAYOUT_FLAGS := --trainers --servers --number-trainers --number-ps
LAYOUT_CHOSEN = $(foreach flag,$(LAYOUT_FLAGS),$(findstring $(flag),$(ARGS)))
08_ddp_rpc: $(RUNTIME)
	@$(PYTHON) 08_ddp_rpc/ddp_rpc.py $(if $(strip $(LAYOUT_CHOSEN)),,$(LAYOUT)) $(ARGS)

##
##   make compare                            02 to 05 in turn, two models: results/compare.png
compare: $(RUNTIME) | results
	@$(if $(HELP),,rm -f results/compare.json results/compare.png)
	@$(TORCHRUN) common/rungs.py --plot results/compare.png --json results/compare.json $(ARGS)

##   make timeline                           a step of 02 to 05 on one axis: results/timeline.png
SCRIPT_OF_no_sync := common/no_sync.py
TRACES = $(foreach rung,no_sync $(LADDER),results/timeline_$(rung).json)
timeline: $(RUNTIME) | results
ifneq ($(HELP),)
	@$(TORCHRUN) $(SCRIPT_OF_05_bucketed) --help
else
	@rm -f results/timeline*
	@number=0; took=; \
	for rung in $(foreach rung,no_sync $(LADDER),$(rung):$(SCRIPT_OF_$(rung))); do \
	  number=$$((number + 1)); start=$$(date +%s); name=results/timeline_$${rung%:*}; \
	  echo "$$number of 5: $${rung#*:}$$took"; \
	  $(TORCHRUN) $${rung#*:} --no-verify --no-baseline --steps 1 --trace $$name.json $(ARGS) \
	    > $$name.txt || exit; \
	  took=" (the one before took $$(($$(date +%s) - start)) s)"; \
	done
	@$(PYTHON) -m common.timeline $(TRACES) --plot results/timeline.png
endif

##   make read [FROM=02 TO=05]               two rungs side by side: results/ladder.html, or in the
##                                           terminal; needs Python alone
read: | $(if $(FROM)$(TO),,results)
	@$(READER) -c '$(NEW_ENOUGH)' || exit 2
	@$(READER) -m common.read $(if $(FROM),--from='$(FROM)') $(if $(TO),--to='$(TO)') $(ARGS)

##   make growth                             05 with models that grow: tiny, small, medium (minutes)
growth: $(RUNTIME)
	@$(TORCHRUN) common/growth.py $(ARGS)

##   make hosts [RATE=1gbit DELAY=0.2ms]     make compare on a network between two hosts, which
##                                           Linux plays here (SCRIPT=… runs another script)
LINK_RATE = $(or $(RATE),1gbit)
LINK_DELAY = $(or $(DELAY),0.2ms)
LINK = '$(LINK_RATE)' '$(LINK_DELAY)'
HOSTS_RUNGS = common/rungs.py --steps 8 --warmup 2 --network '$(LINK_RATE), $(LINK_DELAY)' \
	--plot results/hosts.png --json results/hosts.json
hosts: $(RUNTIME) | results
	@$(if $(SCRIPT)$(HELP),,rm -f results/hosts.json results/hosts.png)
	@exec bash common/hosts.sh $(PYTHON) $(LINK) $(or $(SCRIPT),$(HOSTS_RUNGS)) $(ARGS)

##   make all                                every stage with its defaults
all: $(RUNTIME)
	@number=0; took=; for stage in $(STAGES); do \
	  number=$$((number + 1)); start=$$(date +%s); echo "$$number of 8: $$stage$$took"; \
	  $(MAKE) --no-print-directory $$stage || exit; \
	  took=" (the one before took $$(($$(date +%s) - start)) s)"; \
	done

##   make setup                              make .venv from requirements.txt
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10) and "error: needs Python 3.10")
HAS_TORCH := import sys, importlib.util; sys.exit(importlib.util.find_spec("torch") is None)
check-python:
	@$(PYTHON) -c '$(HAS_TORCH)' || \
	  { echo 'error: PYTHON=$(PYTHON) cannot import torch: pip install -r requirements.txt'; exit 2; }
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check
setup: $(RUNTIME)
.venv/.installed: requirements.txt
	@python3 -c '$(NEW_ENOUGH)' || exit 2
	python3 -m venv .venv
	$(PIP) -r requirements.txt
	@touch $@
.venv/.installed-dev: .venv/.installed requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

##   make test                               the test suite, the fast part
##   make test-full                          all of it: real models, every fault, every wrong flag
##   make test-torch [TORCH="2.9.0 2.15.0"]  make test with these versions of torch, by default with
##                                           all that common/README.md lists; clean-torch: removes
##                                           the environments (one each, 5.5 GB, kept)
##   make soak [N=20]                        the tests with several processes, N times
# In parallel where PYTHON has pytest-xdist; ARGS="-n 0" one by one, as --pdb and -s need it.
WORKERS := $(shell echo $$(( $(CORES) < 4 ? $(CORES) : 4 )))
HAS_XDIST = $(shell $(PYTHON) -c "import xdist; print(1)" 2> /dev/null)
test: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m pytest $(if $(HAS_XDIST),-n $(WORKERS) --dist worksteal) -m "not full" $(ARGS)
test-full: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m pytest $(ARGS)
test-torch:
	@python3 -c '$(NEW_ENOUGH)' || exit 2
	@python3 common/torch_versions.py '$(ARGS)' $(TORCH)
clean-torch:
	@python3 common/torch_versions.py --remove
soak: $(RUNTIME) $(DEVELOPMENT)
	@for round in $$(seq $(N)); do echo "round $$round of $(N)"; \
	  $(PYTHON) -m pytest -q -m "distributed and not full" $(ARGS) || exit; done

##   make lint                               ruff: rules and format; make format puts it right
lint: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
format: $(RUNTIME) $(DEVELOPMENT)
	$(PYTHON) -m ruff format .

##   make reference                          record every reference_output*.txt and picture again
include common/reference.mk

##   make clean                              remove results/ and caches
results:
	@mkdir -p results 2> /dev/null || true
clean:
	rm -rf results .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
##
## NPROC: ranks on this host. PYTHON=python3: an interpreter that has torch, instead of .venv.
## Several hosts, on each:
## make 05_bucketed NPROC=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 [MASTER_PORT=29400]
