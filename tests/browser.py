"""A headless Chromium for pages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
COUNT_SHIFTS = """
window.shifts = 0;
const add = (shift) => { if (!shift.hadRecentInput) window.shifts += shift.value; };
const observer = new PerformanceObserver((list) => list.getEntries().forEach(add));
observer.observe({ type: "layout-shift", buffered: true });
"""


@dataclass
class Browser:
    """One tab; what it asked for and complained about since the last `open`."""

    driver: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, url: str, width: int = 1280, theme: str = "light") -> None:
        self.driver.get("about:blank")
        self.collect()
        self.requests.clear()
        self.complaints.clear()
        self.resize(width, theme)
        self.driver.get(url)
        self.script("await document.fonts.ready; await new Promise(requestAnimationFrame)")

    def resize(self, width: int, theme: str = "light") -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def script(self, body: str, *arguments: object) -> Any:
        """Run an async function's body; waits for it."""
        code = (
            "const done = arguments[arguments.length - 1], given = [...arguments].slice(0, -1);"
            f"(async (...given) => {{ {body} }})(...given)"
            ".then((value) => done(['ok', value]), (error) => done(['error', `${error}`]));"
        )
        status, value = self.driver.execute_async_script(code, *arguments)
        assert status == "ok", value
        return value

    def all(self, css: str) -> list[str]:
        """The texts of all elements that match."""
        found: list[str] = self.script(
            "return [...document.querySelectorAll(given[0])].map((n) => n.textContent)", css
        )
        return found

    def choose(self, css: str, label: str) -> None:
        """Pick the first option whose text begins with the label."""
        self.script(
            "const s = document.querySelector(given[0]);"
            "const o = [...s.options].find((o) => o.text.startsWith(given[1]));"
            "if (!o) throw `${given[1]} is not among ${[...s.options].map((o) => o.text)}`;"
            "s.value = o.value; s.dispatchEvent(new Event('change', { bubbles: true }))",
            css,
            label,
        )

    def collect(self) -> None:
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        self.complaints += [entry["message"] for entry in self.driver.get_log("browser")]

    def quiet(self, *urls: str) -> None:
        """Nothing was said on the console, and nothing asked for but these."""
        self.collect()
        others = [u for u in self.requests if u not in urls and not u.startswith(("data:", "about:"))]
        assert (self.complaints, others) == ([], [])
