# Every target creates .venv by itself. `make demo` trains the digits, `make demo-cascade` two models that draw them one
# after the other, `make demo-memory` shows a model that is too large for copies; `make test` is the test command of README.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadgroup
# One thread per process: tests and the demo run several ranks on few cores.
export OMP_NUM_THREADS ?= 1
# Python keeps what it has compiled, whatever the environment says: else every process of a test compiles all modules.
export PYTHONDONTWRITEBYTECODE =

# A demo that was interrupted goes on; one that is finished exports and scores again.
RESUME_CASCADE = $(if $(wildcard runs/cascade/checkpoints/step-*),--resume latest)
RESUME_DIGITS = $(if $(wildcard runs/digits/checkpoints/step-*),--resume latest)

.PHONY: demo demo-cascade demo-memory test test-planning test-all night explore families fuzz gradients searches memory soak torture doctor-faults planted old-readers oldest wheel-test gpu check docs format install clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/python examples/digits/dataset.py --out runs/digits-data
	@echo "Training as a pipeline of two stages, as the recipe asks, to show one. So small a model also fits every rank whole:"
	@echo "the end of this demo measures that too, and examples/digits/README.md says when a pipeline pays."
	$(BIN)/diffusionpipe train examples/digits/recipe.toml --ranks 2 $(RESUME_DIGITS)
	$(BIN)/python examples/digits/score.py --export runs/digits/export --count 200 --guidance 1.5
	$(BIN)/python examples/digits/compare.py --pipeline runs/digits

demo-cascade: install
	$(BIN)/python examples/cascade/mnist.py --out runs/cascade-data
	$(BIN)/python examples/cascade/folders.py --out runs/cascade-models
	$(BIN)/diffusionpipe train examples/cascade/recipe.toml --ranks 2 $(RESUME_CASCADE)
	$(BIN)/python examples/cascade/judge.py --run runs/cascade
	$(BIN)/python examples/cascade/ways.py --run runs/cascade

demo-memory: install
	$(BIN)/python examples/digits/dataset.py --out runs/digits-data
	$(BIN)/python examples/digits/memory.py

# Both print their CPU seconds with those of the dearest tests and files, and how long they took. test-all runs what test
# leaves out, after it. The tests of the planning half import no torch and start in two seconds.
test: install
	@date +%s > $(VENV)/tests-started; $(PYTEST) -m 'not slow'; status=$$?; \
	echo "make test: $(SINCE_START) s"; exit $$status

PLANNING := $(addprefix tests/,ir costs holding timing schedules passes ordering simulator planner viz)
test-planning: install
	$(PYTEST) -m 'not slow' $(PLANNING)

test-all: test
	@$(PYTEST) -m 'slow and not night'; status=$$?; \
	echo "make test-all: $(SINCE_START) s, make test included"; exit $$status

# The tests that are too dear for each change: models of real size, every family in every layout, jobs that are killed at many moments.
night: install
	$(PYTEST) -m night
	$(MAKE) explore families fuzz gradients searches memory soak torture doctor-faults

# The properties of the tests on other examples each time, and on more where the test does not say how many.
explore: install
	HYPOTHESIS_PROFILE=explore $(PYTEST) -m 'slow or not slow' $(shell grep -rl 'hypothesis import given' tests)

# Tiny models of every family, whole and with adapters, in every layout; drawn on 1, 2 and 3 ranks, and how busy two are.
# diffusers draws from the same words in another process. The tests take every layout once. About 20 minutes.
families: install
	PYTHONPATH=tests $(BIN)/python -m families $(if $(ONLY),--only $(ONLY))

SINCE_START = $$(($$(date +%s) - $$(cat $(VENV)/tests-started)))

# 2,500 mutated inputs; SEED=1 makes other ones. See tests/fuzz/README.md.
SEED ?= 0
fuzz: install
	PYTHONPATH=tests $(BIN)/python -m fuzz --seed $(SEED)

# Random layer graphs under random legal orders against one process; at most 10 minutes. See tests/gradients/README.md.
gradients: install
	PYTHONPATH=tests $(BIN)/python -m gradients --seed $(SEED)

# What ranks really hold beside what is predicted, for every schedule; SHARE=0.1 SEED=2 draws a tenth. See
# tests/live_memory/README.md.
SHARE ?= 1
memory: install
	PYTHONPATH=tests $(BIN)/python -m live_memory --seed $(SEED) --share $(SHARE) $(if $(ONLY),--only "$(ONLY)") $(ARGUMENTS)

# Random small settings planned, held against every 1F1B layout, and planned with more memory. See tests/searches/README.md.
searches: install
	PYTHONPATH=tests $(BIN)/python -m searches --seed $(SEED) $(ARGUMENTS)
	PYTHONPATH=tests $(BIN)/python -m searches.rising --seed $(SEED)

# A job of two ranks; what its processes hold must not grow. MINUTES=5 makes it shorter. See tests/soak/README.md.
MINUTES ?= 20
soak: install
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES)

# Jobs that are killed, stopped and starved; SEED=1 does it at other random moments. See tests/torture/README.md.
torture: install
	PYTHONPATH=tests $(BIN)/python -m torture --seed $(SEED)

# Ten faults, each planted around real runs of doctor, and healthy runs; HEALTHY=2 makes fewer. See tests/doctor_faults/README.md.
HEALTHY ?= 20
doctor-faults: install
	PYTHONPATH=tests $(BIN)/python -m doctor_faults --healthy $(HEALTHY)

# Known faults, each in a copy of the source, and the tests that notice it; at most 40 CPU minutes. ONLY=planner tries some.
# See tests/planted/README.md.
planted: install
	PYTHONPATH=tests $(BIN)/python -m planted $(if $(ONLY),--only "$(ONLY)")

# Exports of every family, opened in environments of earlier versions. See tests/old_readers/README.md.
OLD_READERS := .venv-old-readers
OLD_ENVIRONMENTS := $(OLD_READERS)/transformers-4.44.2 $(OLD_READERS)/transformers-4.57.6
old-readers: install $(OLD_ENVIRONMENTS:=/installed)
	PYTHONPATH=tests $(BIN)/python -m old_readers $(OLD_ENVIRONMENTS) $(if $(ONLY),--only "$(ONLY)")

$(OLD_READERS)/transformers-%/installed: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' constraints.txt) \
		diffusers==0.36.0 transformers==$* peft==0.17.0 accelerate ftfy protobuf sentencepiece
	touch $@

# The wheel as a stranger has it: installed by the lines of the Dockerfile, tried in an empty folder. Two minutes.
WHEEL := .venv-wheel
ALL_EXTRAS = $(WHEEL)/bin/python -c "import tomllib; print(','.join(k for k in tomllib.load(open('pyproject.toml', \
	'rb'))['project']['optional-dependencies'] if k != 'dev'))"
wheel-test:
	rm -rf $(WHEEL) build
	$(PYTHON) -m venv $(WHEEL)
	sed -n 's/^RUN //p' Dockerfile > $(WHEEL)/install.sh
	PATH="$(CURDIR)/$(WHEEL)/bin:$$PATH" sh -eu $(WHEEL)/install.sh
	$(WHEEL)/bin/pip install --quiet -c constraints.txt "diffusionpipe[$$($(ALL_EXTRAS))]"
	mkdir $(WHEEL)/empty
	cd $(WHEEL)/empty && ../bin/python -P $(CURDIR)/tests/wheel/__main__.py $(CURDIR)

# The tests with the least versions that pyproject.toml allows. See tests/oldest/README.md.
OLDEST := .venv-oldest
TESTS ?=
oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadgroup -m 'not slow' $(TESTS)

$(OLDEST)/installed: pyproject.toml constraints.txt tests/oldest/__main__.py
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python tests/oldest/__main__.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt -e '.[dev]'
	touch $@

# What only a GPU can show; LIST=1 prints the commands with their limits and expected times. See docs/gpu.md.
gpu: install
	PYTHONPATH=tests $(BIN)/python -m gpu $(if $(LIST),--list)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

docs: install
	$(BIN)/python docs/make_schedules.py
	PYTHONPATH=tests $(BIN)/python docs/make_combinations.py
	$(BIN)/python docs/make_models.py
	$(BIN)/python docs/make_other_words.py
	$(BIN)/python docs/make_keys.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OLD_READERS) $(OLDEST) $(WHEEL) build .mypy_cache .ruff_cache .hypothesis
