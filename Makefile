# Each target does all its own set-up. PYTHON is any Python from 3.10 to 3.13.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# NCCL where two GPUs are, gloo on the CPU elsewhere.
DEMO_HARDWARE ?= $(shell [ "$$(nvidia-smi -L 2>/dev/null | wc -l)" -ge 2 ] && echo gpu_x2 || echo cpu_x2)
DEMO := submit experiment=digits sweep=digits_grid sweep_name=demo hardware=$(DEMO_HARDWARE) cluster=local --wait

# Where it is set, each process that tests start compiles every file of ours anew: some 0.3 s of CPU (n=8, load 7).
unexport PYTHONDONTWRITEBYTECODE

# What `make test` plays, two parts at once, as tests on a Slurm mostly wait: each part's output comes whole, when it ends.
# One that fails ends no other, and fails all. With SIDE_BY_SIDE=1, or a make before 4.0, one after the other.
PARTS ?= lint unit slurm-tests
SIDE_BY_SIDE ?= $(if $(word 2,$(PARTS)),$(if $(filter output-sync,$(.FEATURES)),2,1),1)

# Releases of Slurm that test-long plays every scenario on; SLURM=24.11 for one alone.
RELEASES ?= $(if $(SLURM),$(SLURM),22.05 24.11 26.05)

.PHONY: demo test test-long soak lint unit coverage mutants test-gpu slurm-tests slurm-24.11 chosen slurm-chosen slurm-touched shared-folder xla keras bench slurm-up slurm-down pythons clean

demo: $(VENV)/.demo  ## A 2 x 2 grid of real trainings on this machine; again: goes on, or says that all is done
	@$(BIN)/hpc-trainer $(DEMO)

test: $(VENV)/.dev  ## Everything that this machine can check; says what it skips and why
	@echo "$(PARTS): $(SIDE_BY_SIDE) at once$(if $(filter-out 1,$(SIDE_BY_SIDE)),; what each says comes when it ends)"
	@$(MAKE) --no-print-directory --jobs=$(SIDE_BY_SIDE) $(if $(filter-out 1,$(SIDE_BY_SIDE)),--output-sync=target) --keep-going $(PARTS)

lint: $(VENV)/.dev  ## Style, types, import contracts, spelling: what pre-commit runs too
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# No test may reach the Slurm of this machine: planted commands come first on PATH, and a call of one fails the run.
# Gives way to the tests beside it: the grace of a preemption is 20 s, its own deadlines are minutes. Three processes for
# two cores: tests that start runs wait for them (26 of them 81 s, with two processes 103 s and 22 % idle, n=1).
UNIT := -m pytest -m "not slurm and not long and not xla" --numprocesses 3 --dist loadfile
unit: $(VENV)/.dev  ## All tests but those on a real Slurm
	@rm -f $(VENV)/.slurm-calls
	PATH="$(CURDIR)/tests/no_slurm:$$PATH" HPC_TRAINER_SLURM_CALLS=$(CURDIR)/$(VENV)/.slurm-calls nice -n 5 $(BIN)/python $(UNIT)

# In every process that tests start. The last report is for people: it names what no test has run yet. Pairs of features
# and hundreds of kills take hours, and run no other lines.
RANKS = $(sort $(wildcard tests/unit/*/test_*ranks.py tests/unit/*/*/test_*ranks.py) $(filter-out %/test_pairs.py %/test_kill.py, \
    $(shell grep -rlE 'mark\.(long|few)' --include='test_*.py' tests/unit/training tests/unit/launch)))
coverage: $(VENV)/.dev  ## The lines that `make unit` and long tests of ranks, training and launch run; fails under 95 % of the core's or of launch's
	@$(BIN)/coverage erase
	nice -n 5 $(BIN)/coverage run $(UNIT)
	nice -n 5 $(BIN)/coverage run -m pytest -m long --numprocesses 3 --dist loadfile $(RANKS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include='hpc_trainer/training/*' --fail-under=95
	$(BIN)/coverage report --include='hpc_trainer/launch/*' --fail-under=95
	$(BIN)/coverage report

# A mutant may signal any process (-1 for 1): where the kernel lets us, it sees no others than its own.
ALONE := $(shell unshare --pid --fork --mount --mount-proc true 2>/dev/null && echo unshare --pid --fork --mount --mount-proc)
mutants: $(VENV)/.dev | $(VENV)/mutants  ## Small errors drawn in state, slurm, launch, advice: do the nearest tests see 85 %? MUTANTS="--seed 1"
	nice -n 19 $(ALONE) $(BIN)/python -m tests.mutants $(MUTANTS)

# Tests on a Slurm mostly wait: three at once, each on a cluster of its own.
CLUSTERS ?= 3
ON_SLURM = $(BIN)/python -m pytest -m "slurm and not long" --numprocesses $(CLUSTERS) --dist worksteal
SLURM_TESTS ?= tests/slurm
slurm-tests: $(VENV)/.dev  ## Lifecycle on a real Slurm; SLURM=24.11 names another release than the host's
	$(ON_SLURM) $(SLURM_TESTS)

# Its preemption differs from the host's: 24.05 changed what an exit within the grace means. What only concerns submitting
# is the same on both; test-long plays that too.
slurm-24.11: $(VENV)/.dev  ## Lifecycle on a newer Slurm than the host's
	SLURM=24.11 $(BIN)/python -m tests.slurm.testbed build  # before the clock of the first test
	SLURM=24.11 $(ON_SLURM) tests/slurm/test_lifecycle.py

# CI's second part, beside a newer Slurm: bounded, as what a change touches may be everything.
CHOSEN ?=
chosen: $(VENV)/.dev  ## Of the long tests: what a change touches, and a sample each day; CHOSEN="--since main --list"
	nice -n 5 $(BIN)/python -m tests.chosen $(CHOSEN)

slurm-chosen: slurm-24.11  ## On a newer Slurm: lifecycle, scenarios of causes that no other test has, two that each day draws
	scenarios=$$($(BIN)/python -m tests.chosen --scenarios 2) && SLURM=24.11 HPC_TRAINER_SCENARIOS=$$scenarios \
	    $(ON_SLURM) tests/slurm/scenarios

slurm-touched: $(VENV)/.dev  ## Long tests on a Slurm that a change touches, two files of them
	files=$$($(BIN)/python -m tests.chosen --slurm-files 2) && if [ -n "$$files" ]; then \
	    $(subst not long,long,$(ON_SLURM)) --maxfail=1 $$files; fi

shared-folder: $(VENV)/.dev  ## What can happen to a run, on NFS, Lustre and others as they are played: some 20 min
	$(BIN)/python -m pytest -m long --numprocesses $(CLUSTERS) --dist worksteal tests/shared_folder tests/slurm/shared_folder

# Few at once: each has an import of torch and some GB of the GPU.
test-gpu: $(VENV)/.dev  ## What makes sense on a GPU alone; some 5 min with GPU_WORKERS=8 and 16 cores
	$(BIN)/python -m pytest -m gpu -p no:benchmark --numprocesses $(or $(GPU_WORKERS),1) --dist loadgroup -rA tests/gpu $(shell grep -rl mark.gpu tests/unit --include=test_*.py)

test-long: export HPC_TRAINER_FUZZ_SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
test-long: $(VENV)/.dev $(VENV)-keras/.made  ## Every scenario of a run's life on three releases of Slurm, and two minutes of the soak: some 2 h
	$(BIN)/python -m pytest -m "long and not slurm" tests/integration tests/unit
	@$(MAKE) --no-print-directory coverage
	$(BIN)/python -m tests.each_alone
	@$(MAKE) --no-print-directory shared-folder
	$(BIN)/python -m pytest -m long $(filter-out %/test_soak.py,$(wildcard tests/slurm/test_*.py))
	@set -e; for release in $(RELEASES); do \
	    SLURM=$$release HPC_TRAINER_SCENARIOS=all $(BIN)/python -m pytest tests/slurm/scenarios \
	        tests/slurm/test_lifecycle.py tests/slurm/test_jobs.py tests/slurm/test_soak.py; \
	done

# The newest torch-xla (November 2026) is for torch 2.9, whose wheels bring CUDA: 7 GB.
XLA ?= 2.9.0
xla: | $(VENV)-xla  ## Trainings on an XLA device, torch-xla on the CPU, in an environment of its own
	$(VENV)-xla/bin/python -m pytest -m xla tests/integration/resume/test_xla.py

# Programs run in it that know nothing of torch. Keras 3 has no fit on several workers: those have Keras 2, by its name of
# today, which asks for a TensorFlow with CUDA.
TENSORFLOW := tensorflow-cpu==2.21.0 keras==3.15.1
keras: $(VENV)/.dev $(VENV)-keras/.made  ## Keras programs that are preempted, on one node and on two; needs root
	$(BIN)/python -m pytest tests/slurm/test_any_program.py -k keras

soak: $(VENV)/.dev  ## Forty runs, ten minutes of preemptions, lost nodes, kills, restarts and cancels; prints its seed
	@$(BIN)/python -m tests.slurm.soak

bench: $(VENV)/.dev $(VENV)/rival $(VENV)-rivals  ## The figures of docs/benchmarks/, as ratios measured in one run
	PYTHONPATH=$$($(VENV)-rivals/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	    $(BIN)/python -m tests.benchmarks $(VENV)/rival

slurm-up: $(VENV)/.dev  ## A real Slurm on this machine: 4 virtual nodes, 16 pretend GPUs (SLURM=24.11, 26.05: newer ones)
	@$(BIN)/python -m tests.slurm.testbed up

slurm-down:  ## Stops what slurm-up started
	@$(PYTHON) -m tests.slurm.testbed down

clean:  ## Removes the virtual environment and caches, never runs/
	rm -rf $(VENV) $(VENV)-* dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Of all that is installed a tenth is ever imported, and Python compiles that then: a minute of CPU less (--no-compile).
# An old pip takes half a minute more for the same packages (23.2 and 26.3).
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	@# Apart from ours: hydra-optuna-sweeper needs an older optuna. Tests of search= put this one first on a child's path.
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target=$(VENV)/optuna5 optuna==5.0.0
	@touch $@ $(VENV)/.demo

# Apart from ours: Hydra looks for plugins in every environment that it starts in.
$(VENV)/rival: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-deps --target=$@ hydra-submitit-launcher==1.2.0

# Apart from ours: only the draw looks there, and no test finds a package that is not of ours.
$(VENV)/mutants: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --no-deps --target=$@ cosmic-ray==8.7.0 parso==0.8.7 stevedore==5.10.0 attrs==26.1.0

# Other training loops, in an environment that finds torch and the rest in ours.
$(VENV)-rivals: | $(VENV)/.dev
	$(BIN)/python -m venv $@
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > $$($@/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	$@/bin/python -m pip install --quiet --constraint constraints.txt lightning==2.6.6 accelerate==1.15.0 webdataset==1.0.2

$(VENV)-keras/.made:
	$(PYTHON) -m venv $(VENV)-keras
	$(VENV)-keras/bin/python -m pip install --quiet --no-compile --constraint constraints.txt $(TENSORFLOW)
	$(VENV)-keras/bin/python -m pip install --quiet --no-compile --no-deps tf_keras==2.21.0
	@touch $@

$(VENV)-xla:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet torch==$(XLA) torch-xla==$(XLA) --editable . pytest pytest-timeout psutil

PYTHONS ?= python3.10 python3.12 python3.13
pythons:  ## The layers without torch, on other Pythons: make pythons PYTHONS="python3.10 python3.13"
	@set -e; for python in $(PYTHONS); do \
	    env=$(VENV)-$$(basename $$python); echo "--- $$($$python --version)"; \
	    [ -x $$env/bin/python ] || $$python -m venv $$env; \
	    $$env/bin/python -m pip install --quiet --constraint constraints.txt hydra-core omegaconf submitit numpy \
	        psutil rich typer pytest pytest-timeout hypothesis tomli; \
	    PYTHONPATH=. $$env/bin/python -m pytest -q $(addprefix tests/unit/,config runs slurm runtime state launch operate); \
	done
