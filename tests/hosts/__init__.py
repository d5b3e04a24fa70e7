"""Imitated pool nodes, to run the suites on: see tests/on_host.py, and `hosts.nodes` for what each is."""
