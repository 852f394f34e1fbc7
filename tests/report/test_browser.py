"""The page in a real browser: silent, complete, unharmed by what a model wrote, fit for a telephone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from browser import Browser
from fake_runs import PIECES, Evaluated, make_evaluation, make_response, make_run
from tstar.report.content import build
from tstar.report.page import render
from tstar.report.watch import serve
from tstar.schedule import read_responses

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "</script><script>window.hacked = 3</script>",
    "<!--",
    "\u2028\u2029",
    "\u202eright to left\u202c",
    "\ud800",
    "&lt;b&gt;",
    "${window.hacked = 4}",
    "\x00\x1b[31m",
    "</div></main>",
]


UNFOLD = "document.querySelectorAll('details').forEach((d) => { d.open = true })"
SHOWN = "return [...document.querySelectorAll('.t.on')].map((n) => n.textContent).join('')"
STATS = "return [...document.querySelectorAll('.player output')].map((n) => n.value)"


def write_page(path: Path, *sources: Path) -> str:
    path.write_text(render(build(list(sources))), encoding="utf-8")
    return path.as_uri()


# -- the page ----------------------------------------------------------------------------------


def test_it_opens_from_disk_in_silence(browser: Browser, world_page: str) -> None:
    browser.open(world_page)
    browser.quiet(world_page)
    assert browser.script("return window.shifts") < 0.001
    assert browser.all("nav a")[0] == "Validation"
    assert browser.all("h1") == ["experiment"]


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_overflows(browser: Browser, world_page: str, width: int, theme: str) -> None:
    browser.open(world_page, width, theme)
    browser.script(UNFOLD)
    overflowing = browser.script(
        """const inner = ".scroll, .screen, pre, .answer-text, nav, .skip";
        return [...document.querySelectorAll("body *")].filter((n) => !n.closest(inner) &&
          n.getBoundingClientRect().right > innerWidth + 1).map((n) => n.outerHTML.slice(0, 100))"""
    )
    assert overflowing == []
    assert browser.script("return document.documentElement.scrollWidth") == width
    colour = browser.script("return getComputedStyle(document.documentElement).backgroundColor")
    assert (colour == "rgb(16, 18, 22)") == (theme == "dark")


def test_the_theme_can_be_chosen(browser: Browser, world_page: str) -> None:
    browser.open(world_page)
    theme = "return document.documentElement.dataset.theme"
    assert browser.script(theme) == "light"
    browser.script("document.getElementById('theme').click()")
    assert browser.script(theme) == "dark"
    browser.script("document.getElementById('theme').click()")
    assert browser.script(theme) == "light"


def test_controls_and_pictures_have_names(browser: Browser, world_page: str) -> None:
    browser.open(world_page)
    nodes = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    wanted = {"button", "combobox", "slider", "image", "img", "link", "table", "navigation", "region"}
    found = [n for n in nodes if n.get("role", {}).get("value") in wanted and not n.get("ignored")]
    roles = {n["role"]["value"] for n in found}
    assert {"button", "combobox", "slider", "link"} <= roles
    nameless = [n["role"]["value"] for n in found if not n.get("name", {}).get("value")]
    assert [role for role in nameless if role != "table"] == []  # a table's name is its region's


def test_it_prints_light_and_whole(browser: Browser, world_page: str) -> None:
    browser.open(world_page, theme="dark")
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(printed) > 50_000
    hidden = "return document.querySelectorAll('.t:not(.on)').length"
    num_tokens = browser.script(hidden)
    assert num_tokens > 0
    browser.script("dispatchEvent(new Event('beforeprint'))")
    assert browser.script(hidden) == 0  # a response stands whole on paper
    browser.script("dispatchEvent(new Event('afterprint'))")
    assert browser.script(hidden) == num_tokens
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    style = (
        "const s = getComputedStyle(document.querySelector(given[0])); return [s.backgroundColor, s.display]"
    )
    assert browser.script(style, "html") == ["rgb(255, 255, 255)", "block"]
    assert browser.script(style, ".controls")[1] == "none"
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


# -- the figures -------------------------------------------------------------------------------


def test_each_figure_has_the_runs_numbers(browser: Browser, world_page: str, world: Path) -> None:
    browser.open(world_page)
    assert len(browser.all("figure[id^=figure-]")) == 5
    browser.script(UNFOLD)

    events = [json.loads(line) for line in (world / "tstar" / "metrics.jsonl").read_text().splitlines()]
    curve = [e for e in events if e["event"] == "validation"]
    rows = browser.script(
        "return [...document.querySelectorAll('#validation tbody tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    ours = [row for row in rows if row[1] == "tstar"]
    assert [float(row[0]) for row in ours] == [e["update_step"] for e in curve]
    shown = [float(row[2].removesuffix(" %")) for row in ours]
    assert shown == pytest.approx([100 * e["accuracy"] for e in curve], abs=0.051)
    assert browser.all("#validation .stage-mark text") == ["B = 8", "B = 16"]
    assert browser.all("#validation .reference-mark text") == ["base, B = 4", "base, B = 8", "base, B = 16"]
    assert "kl 0.71" in browser.all("#validation .alarm + .alarm-mark + title")[0]

    assert browser.script("return document.querySelectorAll('#health [data-panel]').length") == 9
    rewards = [e["reward_mean"] for e in events if e["event"] == "train" and e["update_step"] == 60]
    last = browser.all("#health [data-panel=reward] tbody tr:last-child td:nth-child(3)")
    assert float(last[0]) == pytest.approx(sum(rewards) / 2, abs=5e-4)

    summary = json.loads((world / "eval" / "tracerl-b16" / "summary.json").read_text())
    tables = " ".join(browser.all("#tables .tables table"))
    accuracy, strict = summary["accuracy"], summary["local_strict"]
    assert f"{100 * accuracy['value']:.1f}[{100 * accuracy['low']:.1f}, " in tables
    assert f"{strict['value']:.3f}[{strict['low']:.3f}, {strict['high']:.3f}]" in tables
    bars = browser.script("return document.querySelectorAll('#block-size .error').length")
    assert bars == 3 + 2 + 3 + 2 + 2  # base, TraceRL, T* on one data set; base, T* on the other


def test_heat_maps_show_each_token_at_its_step(browser: Browser, world_page: str, world: Path) -> None:
    browser.open(world_page)
    browser.choose("#case-study select", "math500-0000")
    responses = read_responses(world / "eval" / "tracerl-b8" / "responses.jsonl")
    is_correct = "✓ correct" in browser.all("#case-study .case-row:nth-child(2) figure")[0]
    own = [r for r in responses if r.problem == "math500-0000" and r.is_correct == is_correct]
    first = own[0]
    cells = browser.all("#case-study .case-row:nth-child(2) figure:nth-child(2) .heat rect title")
    trajectory = first.trajectory
    in_block = []
    for block in trajectory.partition.response_slices:
        steps = trajectory.unmask_step[block]
        in_block += (steps - steps.min() + 1).tolist()
    shown = [int(text.split("step ")[1].split(" ")[0]) for text in cells]
    assert shown == in_block[: trajectory.stop_length]


def test_a_method_can_be_hidden(browser: Browser, world_page: str) -> None:
    browser.open(world_page)
    drawn = "#validation [data-series]"
    series = f"return [...document.querySelectorAll('{drawn}')].map((n) => n.dataset.series)"
    assert "tstar" in browser.script(series)
    browser.script(
        "[...document.querySelectorAll('#validation .legend button')]"
        ".find((b) => b.textContent === 'tstar').click()"
    )
    assert browser.script(series) == ["direct-b16", "direct-b8"]


def test_seeds_lie_over_each_other(browser: Browser, tmp_path: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / "e" / f"seed{seed}" / "tstar", [(4, 5), (8, 5)], seed=seed)
        for label, accuracy in (("base", 0.5), ("T*", 0.6)):
            how = Evaluated(label, 8, accuracy + 0.01 * seed, num_problems=2)
            make_evaluation(tmp_path / "e" / f"seed{seed}" / "eval" / label, how, seed=seed)
    url = write_page(tmp_path / "report.html", tmp_path / "e")
    browser.open(url)
    assert browser.all(".runs .name") == ["tstar 3 seeds"]
    assert browser.all(".verdict strong") == [
        "B = 8: T* is 10.0 points [8.3, 11.7] ahead of base over 3 seeds."
    ]
    assert browser.all("#validation .legend button") == ["tstar (3 seeds)"]
    count = "return document.querySelectorAll(given[0]).length"
    assert browser.script(count, "#validation .faint") == 3
    assert browser.script(count, "#validation [data-series=tstar]") == 4  # and their mean
    assert browser.script(count, "#health [data-panel=reward] [data-series=tstar]") == 4
    assert browser.script(count, "#validation .stage-mark line") == 1
    assert browser.script(count, "#block-size .error") == 2
    assert {"base ×3", "T* ×3"} <= set(browser.all("#schedules .legend button"))
    browser.script("document.querySelector('#validation .legend button').click()")
    assert browser.script(count, "#validation [data-series=tstar]") == 0
    browser.quiet(url)


# -- the player --------------------------------------------------------------------------------


def scrub(browser: Browser, step: int) -> None:
    browser.script(
        "const range = document.querySelector('.player input');"
        "range.value = given[0]; range.dispatchEvent(new Event('input', { bubbles: true }))",
        step,
    )


@pytest.fixture
def played(browser: Browser, world_page: str, world: Path) -> Iterator[tuple[Browser, str, int]]:
    """The player with a response; its text and its number of steps."""
    browser.open(world_page)
    browser.choose("#player select", "TraceRL, B = 16")
    browser.choose("#player label:nth-child(3) select", "math500-0001")
    sample = "document.querySelector('#player label:nth-child(4) select').selectedOptions[0].text"
    line = int(browser.script(f"return {sample}").removeprefix("line ").split(",")[0])
    response = read_responses(world / "eval" / "tracerl-b16" / "responses.jsonl")[line - 1]
    assert response.problem == "math500-0001"
    trajectory = response.trajectory
    text = "".join(PIECES[i] for i in trajectory.response_ids[: trajectory.stop_length].tolist())
    yield browser, text, trajectory.forwards.denoise
    tpf = f"{trajectory.stop_length / trajectory.forwards.denoise:.2f}"
    assert browser.script(STATS)[3:] == [tpf, "correct" if response.is_correct else "wrong"]


def test_it_plays_to_the_full_text(played: tuple[Browser, str, int]) -> None:
    browser, text, num_steps = played
    assert browser.script(SHOWN) == ""
    browser.script("document.querySelector('.player [aria-label=Speed]').value = '3'")
    browser.script("document.querySelector('.play').click()")
    assert browser.all(".play") == ["Pause"]
    browser.script(
        "while (document.querySelector('.play').textContent === 'Pause')"
        "  await new Promise((r) => setTimeout(r, 20))"
    )
    assert browser.script(SHOWN) == text
    assert browser.script(STATS)[0] == f"{num_steps} / {num_steps}"


def test_it_scrubs(played: tuple[Browser, str, int]) -> None:
    browser, text, num_steps = played
    seen = []
    for step in (num_steps // 2, 1, num_steps, 0):
        scrub(browser, step)
        seen.append(len(browser.script(SHOWN)))
    assert 0 < seen[1] < seen[0] < seen[2] == len(text)
    assert seen[3] == 0
    scrub(browser, 1)
    first = browser.script("return document.querySelectorAll('.t.on').length")
    assert browser.script(STATS)[1].startswith(f"{first} / ")
    assert len(browser.all(".this-step li")) == first
    assert all(entry.endswith("%") for entry in browser.all(".this-step li"))


def test_the_keyboard_works(played: tuple[Browser, str, int]) -> None:
    browser, text, num_steps = played
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    screen = browser.driver.find_element(By.CSS_SELECTOR, ".screen")

    def at() -> int:
        return int(browser.script(STATS)[0].split(" ")[0])

    positions = []
    for keys in (Keys.ARROW_RIGHT * 3, Keys.ARROW_LEFT, Keys.END, Keys.HOME):
        screen.send_keys(keys)
        positions.append(at())
    assert positions == [3, 2, num_steps, 0]
    screen.send_keys(" ")
    assert browser.all(".play") == ["Pause"]
    screen.send_keys(" ")
    assert browser.all(".play") == ["Play"]
    slider = browser.driver.find_element(By.CSS_SELECTOR, ".player input")
    slider.send_keys(Keys.END)
    assert at() == num_steps
    assert browser.script(SHOWN) == text


def test_solved_and_unsolved_problems_can_be_asked_for(browser: Browser, world_page: str) -> None:
    browser.open(world_page)
    for name, verdict in (("solved", "correct"), ("unsolved", "wrong")):
        browser.choose("#player label:nth-child(2) select", name)
        assert browser.script(STATS)[4] == verdict
        assert all(verdict in text for text in browser.all("#player label:nth-child(4) option"))


# -- hostile text ------------------------------------------------------------------------------


def test_hostile_text_is_text(browser: Browser, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pieces = {**PIECES, **{100 + i: text for i, text in enumerate(HOSTILE)}}
    ids = [100 + i for i in range(len(HOSTILE))] + [1, 2, 0]
    name = HOSTILE[2]
    responses = [make_response(rng, name, True, 4, ids=ids)]
    make_evaluation(
        tmp_path / "e" / "a",
        Evaluated("</script><script>window.hacked = 5</script>", 4, 1.0, num_samples=1),
        responses=responses,
        pieces=pieces,
        questions=HOSTILE,
        policy=HOSTILE[1],
        data=HOSTILE[0],
    )
    run = make_run(tmp_path / "e" / "<img src=x onerror=alert(1)>", [(4, 3)])
    (run / "config.yaml").write_text(f"name: '{HOSTILE[2]}'\n# {HOSTILE[3]}\n")
    url = write_page(tmp_path / "report.html", tmp_path / "e")
    for width in (1280, 360):
        browser.open(url, width)
        browser.script(UNFOLD)
        scrub(browser, 10**6)
        browser.quiet(url)
        assert browser.script("return window.hacked") is None
        assert browser.script("return document.querySelectorAll('img, main script, iframe').length") == 0
        assert browser.script("return document.documentElement.scrollWidth") == width
    shown = browser.script(SHOWN)
    controls = "⟨U+2028⟩⟨U+2029⟩⟨U+202E⟩right to left⟨U+202C⟩"
    assert shown.startswith("".join(HOSTILE[:4]) + controls + "\ufffd&lt;b&gt;${window")
    assert shown.endswith("⟨U+0000⟩⟨U+001B⟩[31m</div></main>First the<|im_end|>")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("</script") == 2
    assert not {"\u2028", "\u2029", "\x00"} & set(text)


def test_a_megabyte_in_a_response_is_survived(browser: Browser, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pieces = {**PIECES, 100: "x" * 1_000_000, 101: "long" * 30}
    responses = [
        make_response(rng, "one-token", True, 8, ids=[1, 100, 0]),
        make_response(rng, "many-tokens", False, 8, ids=[101] * 5000 + [0]),
    ]
    make_evaluation(
        tmp_path / "e", Evaluated("T*", 8, 0.5, num_samples=1), responses=responses, pieces=pieces
    )
    url = write_page(tmp_path / "report.html", tmp_path / "e")
    browser.open(url, 360)
    assert browser.script("return document.documentElement.scrollWidth") == 360
    notices = " ".join(browser.all(".notices li"))
    assert "the first 4,096 tokens are shown" in notices
    assert "longer than 400 characters" in notices
    browser.choose("#player label:nth-child(3) select", "many-tokens")
    scrub(browser, 10**6)
    assert browser.script("return document.querySelectorAll('.t.on').length") == 4096
    browser.quiet(url)


# -- live --------------------------------------------------------------------------------------


def test_a_live_run_is_updated_in_place(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [(4, 12)], is_ended=False)
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(metrics[:8]) + metrics[8][:30])  # as if being written
    server = serve([run], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        browser.open(url)
        assert "3 updates done" in browser.all(".runs .status")[0]
        browser.script("window.kept = document.querySelector('#player')")
        browser.script("scrollTo({ top: 500, behavior: 'instant' })")
        place = "return document.querySelector('#validation').getBoundingClientRect().top"
        before = browser.script(place)
        (run / "metrics.jsonl").write_text("".join(metrics))
        browser.script(
            "while (!document.querySelector('.runs .status').textContent.includes('12 updates done'))"
            "  await new Promise((r) => setTimeout(r, 50))"
        )
        assert browser.script("return window.kept === document.querySelector('#player')")
        assert browser.script(place) == pytest.approx(before, abs=2)
        assert browser.all("#live") == ["live"]
        browser.quiet(url, f"{url}report.json")
    finally:
        browser.driver.get("about:blank")
        server.shutdown()
        thread.join()
        server.server_close()
