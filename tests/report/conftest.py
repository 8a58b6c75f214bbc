"""One browser for all tests of pages."""

import chromium as driver
import pytest


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Headless Chromium; see chromium.py."""
    if driver.program() is None:
        pytest.skip("needs Chromium on the PATH")
    browser = driver.Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
