# make demo   the main job: a server, the sample tasks, 32 concurrent episodes, a table
# make test   style, types, layering and the whole test suite
# Both set up .venv themselves; a second run is fast.
PYTHON ?= python3
# A strict editable install links file by file: a new or renamed module needs a new install.
STAMP := .venv/installed-$(shell (cat pyproject.toml constraints.txt; ls client/*.py server/*.py isolation/*.py) | cksum | cut -d' ' -f1)

.PHONY: demo test lint clean
demo: $(STAMP)
	.venv/bin/python tests/demo.py

# The isolation tests count every process and descriptor of theirs, so nothing runs beside them. The others look only at
# what is below servers of their own, and wait more than they compute: three workers keep two cores busy.
test: lint
	.venv/bin/python -m pytest tests/isolation
	.venv/bin/python -m pytest --ignore=tests/isolation --numprocesses 3 --dist worksteal

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	MYPYPATH=tests .venv/bin/mypy --explicit-package-bases --exclude tests/tasks tests
	.venv/bin/lint-imports

$(STAMP):
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --config-settings editable_mode=strict --editable '.[server,dev]'
	rm -f .venv/installed-*
	touch $@

clean:
	rm -rf .venv build *.egg-info
