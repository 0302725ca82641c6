## make STAGE [NPROC=2] [ARGS="--help"]     run a stage; the first run makes .venv (minutes, 5.5 GB)
##
##   make 01_allreduce                       all-reduce, measured and opened up
##   make 01_allreduce/slow_network          is an emulated network as slow as requested?
##   make 02_naive_ddp                       one all-reduce per parameter, after backward
##   make 03_flat_ddp                        one all-reduce of one flat tensor, after backward
##   make 04_overlap_ddp                     one all-reduce per parameter, during backward
##   make 05_bucketed                        one all-reduce per bucket, during backward
##   make 05_bucketed/bucket_sweep           which bucket size is best, measured and predicted
##   make 05_bucketed/send_less              what sending less buys: bfloat16, DiLoCo, PowerSGD
##   make 05_bucketed/compare                02 to 05 beside each other: make compare
##   make 05_bucketed/predict                what a model of the step predicts, and what is measured
##   make 06_sharded_optimizer               optimizer state split over the ranks (ZeRO stage 1)
##   make 06_sharded_optimizer/zero2         gradients split too, and as fast as DDP (ZeRO stage 2)
##   make 06_sharded_optimizer/fsdp          gradients and parameters split too (ZeRO stage 3)
##   make 07_resnet_ddp                      ResNet-18 on one device against torch DDP on NPROC
##   make 07_resnet_ddp/sweep                iteration time over models and numbers of ranks
##   make 07_resnet_ddp/compile_ddp          DDP and FSDP, eager and compiled
##   make 08_ddp_rpc                         DDP for the dense part, RPC servers for the embeddings
##
##   make compare, make timeline             02 to 05 in turn; a step of each: results/*.png
##   make hosts [RATE=1gbit DELAY=1ms]       make compare between two hosts that Linux plays here
##   make read                               02 to 05 side by side: results/read.html
##   make step                               open the page that simulates a step, in a browser
##   make check MINE=my_ddp.py:MyDDP         is your own class right? (see tools/check)
##   make all                                every stage with its defaults
##   make setup, make lint                   .venv with what the tests need; ruff
##   make test, make test-full               the fast tests; all of them
##   make reference [ONLY=05_bucketed]       record every reference_output*.txt and picture again
##   make clean                              remove caches; results/ too with RESULTS=1
##
## PYTHON=python3         an interpreter that has torch, instead of .venv
## NPROC=4                ranks on this host
## NETWORK=1gbit,1ms      an emulated network of this rate and delay (01_allreduce/slow_network)
## BACKEND=gloo or nccl   what carries the bytes
## MINE=my_ddp.py:MyDDP   make compare, make check: a class of your own
NPROC ?= 2
STAGES := $(sort $(patsubst %/README.md,%,$(wildcard 0?_*/README.md)))
BY_ITSELF := 01_allreduce 08_ddp_rpc
BY_TORCHRUN := $(filter-out $(BY_ITSELF) 07_resnet_ddp,$(STAGES) \
	$(patsubst %/README.md,%,$(wildcard 0?_*/*/README.md)))
COMPARE := 05_bucketed/compare
READER := $(or $(PYTHON),python3)
RUNTIME := $(if $(PYTHON),check-python,.venv/.installed)
TESTING := $(if $(PYTHON),check-python,.venv/.installed-dev)
PYTHON ?= .venv/bin/python
ifeq ($(shell test '$(NPROC)' -ge 1 2> /dev/null && echo yes),)
$(error NPROC='$(NPROC)' is not a whole number of at least 1)
endif
TIMES_MINE := compare $(COMPARE) hosts 06 06_sharded_optimizer 06_sharded_optimizer/fsdp
ifneq ($(and $(MINE),$(filter-out check $(TIMES_MINE),$(MAKECMDGOALS))),)
$(error MINE='$(MINE)' is for make compare, which times a class, or make check, which judges it)
endif
ifneq ($(and $(NETWORK),$(filter 01 01_allreduce 08 08_ddp_rpc hosts check,$(MAKECMDGOALS))),)
$(error NETWORK='$(NETWORK)' is for what torchrun starts here: see 01_allreduce/slow_network)
endif

QUOTED = '$(subst ','\'',$(1))'
OPTION = $(if $($(2)), --$(1) $(call QUOTED,$($(2))))
FLAGS = $(OWN)$(call OPTION,backend,BACKEND) $(ARGS)
NPROC_GIVEN = $(if $(filter file,$(origin NPROC)),, --nproc $(NPROC))
OVER = $(if $(NETWORK),01_allreduce/slow_network/over.py $(call QUOTED,$(NETWORK)) )
TORCHRUN = "$(PYTHON)" -m tools.torchrun --standalone --nproc-per-node $(NPROC)
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
NO_RANK = env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u LOCAL_WORLD_SIZE "$(PYTHON)"
unexport OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY  # with them importing torch leaves one core
LESSON = $@/$(shell echo $(@F) | sed 's/^[0-9]*_//').py

.NOTPARALLEL:
.PHONY: help setup test test-full hosts lint all reference clean check compare timeline read step \
	check-python 07_resnet_ddp $(BY_TORCHRUN) $(BY_ITSELF)
help:
	@sed -n 's/^## \{0,1\}//p' Makefile
# make 05 and make 05_bucketed/ are make 05_bucketed.
$(foreach stage,$(STAGES),$(eval $(firstword $(subst _, ,$(stage))) $(stage)/: $(stage)))
timeline 01_allreduce/slow_network: NETWORK ?= 1gbit,1ms
$(BY_TORCHRUN): $(RUNTIME)
	$(TORCHRUN) $(OVER)$(LESSON)$(FLAGS)
$(BY_ITSELF): $(RUNTIME)
	$(NO_RANK) $(LESSON)$(NPROC_GIVEN)$(FLAGS)
07_resnet_ddp: $(RUNTIME)
	$(if $(filter -h --help,$(ARGS)),,$(NO_RANK) $(OVER)$(LESSON)$(FLAGS))
	$(TORCHRUN) $(OVER)$(LESSON)$(FLAGS)
$(TIMES_MINE): OWN = $(call OPTION,mine,MINE)
compare: $(COMPARE)
timeline: $(RUNTIME)
	$(TORCHRUN) $(OVER)$(COMPARE)/timeline.py$(FLAGS)
hosts: CABLE = $(call QUOTED,$(or $(RATE),1gbit)) $(call QUOTED,$(DELAY))
hosts: $(RUNTIME)
	exec bash tools/hosts.sh "$(PYTHON)" $(CABLE) $(COMPARE)/compare.py$(FLAGS)
check: MINE_FLAGS = $(call OPTION,kind,KIND)$(call OPTION,level,LEVEL)$(call OPTION,layers,LAYERS)
check: $(RUNTIME)
	$(NO_RANK) tools/check/check.py $(if $(MINE),$(call QUOTED,$(MINE)))$(MINE_FLAGS)$(NPROC_GIVEN) $(ARGS)
read:
	"$(READER)" -m tools.read
step:
	"$(READER)" -m webbrowser "file://$(CURDIR)/$(lastword $(wildcard */*/step.html results/step.html))"
all: $(STAGES)
setup: $(TESTING)
check-python:
	@"$(PYTHON)" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' || \
	  { echo 'error: PYTHON=$(PYTHON) cannot import torch: pip install -r requirements.txt'; exit 2; }
.venv/.installed: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: needs Python 3.10")'
	python3 -m venv .venv
	$(PIP) -r $< && touch $@
.venv/.installed-dev: requirements-dev.txt .venv/.installed
	$(PIP) -r $< && touch $@
PYTEST = "$(PYTHON)" -m pytest -n auto --maxprocesses 4 --dist worksteal
test: $(TESTING)
	$(PYTEST) -m "not full" $(ARGS)
test-full: $(TESTING)
	$(PYTEST) $(ARGS)
lint: $(TESTING)
	"$(PYTHON)" -m ruff check .
	"$(PYTHON)" -m ruff format --check .
reference: $(RUNTIME)
	"$(PYTHON)" -m tools.record $(ONLY)
clean:
	rm -rf $(if $(RESULTS),results) .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
