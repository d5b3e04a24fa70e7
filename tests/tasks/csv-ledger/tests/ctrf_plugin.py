"""A pytest plugin for `--ctrf FILE`: writes the run as a CTRF report (https://ctrf.io)."""

import json
import time
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--ctrf", metavar="FILE", help="write a CTRF report to FILE")


def pytest_configure(config):
    if config.getoption("--ctrf"):
        config.pluginmanager.register(CtrfReport(Path(config.getoption("--ctrf"))), "ctrf-report")


class CtrfReport:
    def __init__(self, path):
        self.path = path
        self.start_ms = int(time.time() * 1000)
        self.tests = {}

    def pytest_runtest_logreport(self, report):
        """Called for a test's setup, call and teardown: the worst outcome is the test's status."""
        test = self.tests.setdefault(report.nodeid, {"name": report.nodeid, "status": "passed", "duration": 0})
        test["duration"] += round(report.duration * 1000)
        if report.outcome != "passed" and test["status"] != "failed":
            test["status"] = report.outcome
            test["message"] = str(report.longrepr)[-2000:]

    def pytest_collectreport(self, report):
        if report.failed:
            self.tests[report.nodeid] = {
                "name": report.nodeid, "status": "failed", "duration": 0, "message": str(report.longrepr)[-2000:],
            }  # fmt: skip

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        tests = list(self.tests.values())
        statuses = ("passed", "failed", "skipped", "pending", "other")
        summary = {"tests": len(tests)} | {
            status: sum(test["status"] == status for test in tests) for status in statuses
        }
        summary |= {"start": self.start_ms, "stop": int(time.time() * 1000)}
        results = {"tool": {"name": "pytest", "version": pytest.__version__}, "summary": summary, "tests": tests}
        self.path.write_text(json.dumps({"reportFormat": "CTRF", "specVersion": "0.0.0", "results": results}, indent=1))
