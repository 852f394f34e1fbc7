"""A real browser, if the machine has one, and something to report on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import COUNT_SHIFTS, FLAGS, Browser
from fake_runs import make_world
from tstar.report.content import build
from tstar.report.page import render
from tstar.report.record import Report


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.skip("chromium and chromedriver are absent: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        driver.set_script_timeout(20)
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": COUNT_SHIFTS})
        yield Browser(driver)
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that an experiment leaves behind; nobody writes into it."""
    return make_world(tmp_path_factory.mktemp("world") / "experiment")


@pytest.fixture(scope="session")
def world_report(world: Path) -> Report:
    return build([world])


@pytest.fixture(scope="session")
def world_page(world_report: Report, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of its report, on disk."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(world_report), encoding="utf-8")
    return path.as_uri()
