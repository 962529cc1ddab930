"""The inspector in a real browser, opened from the disk: what ``test_inspector_in_a_browser.py`` checks, of any run:

    uv run python tests/browser/inspector_in_chromium.py RUN ... [--shots DIR]

Takes finished runs; makes a hostile one itself and, with ``--samples 100000``, a large one. Chromium is fetched from
npm's registry (once, 68 MB).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import chromium
import inspector_runs

from gdpo_nemo.observe.samples import read_rollouts, rollout_files
from gdpo_nemo.tools.inspect import builder

SIZES = {"wide": (1400, 900), "tablet": (900, 1100), "phone": (390, 844)}
READY = 'body[data-ready="all"]'


class Visit:
    """A page of a site, which notes whatever the browser complains of and whatever it fetches."""

    def __init__(self, browser: Any, page: Path, size: str = "wide", scheme: str = "light", address: str = ""):
        width, height = SIZES[size]
        self.complaints: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("a dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self._check(request.url))
        self.folder = page.parent.resolve().as_uri()
        start = time.monotonic()
        self.page.goto(f"{page.resolve().as_uri()}{address}")
        self.page.wait_for_selector("body[data-ready]", timeout=120_000)
        self.first_view_s = time.monotonic() - start
        self.page.wait_for_selector(READY, timeout=120_000)

    def _check(self, address: str) -> None:
        if not address.startswith(self.folder):
            self.complaints.append(f"asked for {address}")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait(self, selector: str, text: str) -> None:
        self.page.locator(selector).filter(has_text=text).first.wait_for(timeout=120_000)

    def until(self, expression: str, argument: Any = None) -> None:
        """Wait until JavaScript holds. Playwright's own wait compiles a text in the page, which its policy forbids."""
        deadline = time.monotonic() + 120
        while not self.page.evaluate(expression, argument):
            assert time.monotonic() < deadline, f"never: {expression}"
            self.page.wait_for_timeout(50)

    def close(self) -> None:
        assert self.complaints == [], self.complaints
        assert self.page.title() != "harmed"
        self.context.close()


def value(visit: Visit, name: str) -> str:
    """What the panel below the tokens says of the chosen one."""
    return visit.text(f'[data-value="{name}"]').strip()


def check_run(browser: Any, run: Path, page: Path) -> None:
    """Open, filter, sort, search, follow a permalink, read a token, compare, go by keys."""
    files = dict(rollout_files(run))
    step = sorted(files)[len(files) // 2]
    records = read_rollouts(files[step])
    record = max(records, key=lambda found: len(found["completion_ids"]))
    total = sum(len(read_rollouts(path)) for path in files.values())
    group = group_number(records, record)
    address = f"#{step}/{group}/{record['sample_index']}"
    visit = Visit(browser, page, address=address)
    visit.wait("#detail h2", f"Step {step}, group {group}, sample {record['sample_index']}")
    assert f"{total:,} samples" in visit.text("#count") or "validation" in visit.page.content()
    check_token(visit, record)
    check_filters(visit, records, step)
    check_search(visit, record)
    check_keys(visit)
    visit.close()


def group_number(records: list[dict[str, Any]], wanted: dict[str, Any]) -> int:
    """The place of a record's group in its file."""
    number = -1
    before: Any = None
    for record in records:
        key = (record["prompt_id"], record["position"])
        number += key != before
        before = key
        if record is wanted:
            return number
    raise AssertionError("no such sample")


def check_token(visit: Visit, record: dict[str, Any]) -> None:
    """The values of tokens on the page are those of the file."""
    tokens = len(record["completion_ids"])
    for _ in range(min(3, tokens)):
        visit.page.keyboard.press("ArrowRight")
    for place in {min(2, tokens - 1), tokens - 1}:
        check_values(visit, record, place)
    for name, reward in record["rewards"].items():
        row = visit.page.locator("#rewards tbody tr").filter(has=visit.page.get_by_text(name, exact=True)).first
        assert reward is None or math.isclose(float(row.locator("td").nth(1).inner_text()), reward, abs_tol=5e-4)
    visit.page.locator("details summary").first.click()
    assert visit.text("#completion").strip() == record["completion"].strip() or not record["completion"].isprintable()


def check_values(visit: Visit, record: dict[str, Any], place: int) -> None:
    """What the page says of the token at ``place`` is what the file says."""
    visit.page.evaluate("i => document.querySelector(`[data-token='${i}']`).click()", place)
    assert value(visit, "token") == f"{place} of {len(record['completion_ids'])}"
    assert value(visit, "id") == str(record["completion_ids"][place])
    written = record["loss_mask"] is None or record["loss_mask"][place]
    assert value(visit, "written by") == ("policy" if written else "environment")
    for name, key in (("log-prob", "logprobs"), ("trainer", "trainer_logprobs"), ("entropy", "entropies")):
        values = record.get(key)
        if not values:
            assert name == "entropy" or value(visit, name) == "–"
        elif values[place] is None:
            assert value(visit, name) == "–", (name, place)
        else:
            assert math.isclose(float(value(visit, name)), values[place], abs_tol=1e-6), (name, place)


def check_turns(browser: Any, run: Path, page: Path) -> int:
    """The longest conversation of a run: who wrote what, the calls of tools, and every token's values. Returns its
    turns of the policy; 0 where the run has none of several turns."""
    found = [(step, read_rollouts(path)) for step, path in rollout_files(run)]
    several = [(r, step, records) for step, records in found for r in records if r["turns"] > 1 and r["loss_mask"]]
    if not several:
        return 0
    record, step, records = max(several, key=lambda one: ("<tool_call>" in one[0]["completion"], one[0]["turns"]))
    visit = Visit(browser, page, address=f"#{step}/{group_number(records, record)}/{record['sample_index']}")
    visit.wait("#detail h2", f"Step {step}, group")
    mask = record["loss_mask"]
    runs = [mask[0], *(after for before, after in zip(mask, mask[1:]) if after != before)]
    shown = visit.page.eval_on_selector_all("#tokens .turn", "all => all.map(one => one.className)")
    assert shown == [f"turn {'policy' if written else 'environment'}" for written in runs]
    underlined = "all => all.map(one => +one.dataset.token)"
    tools = visit.page.eval_on_selector_all("#tokens .tool", underlined)
    assert bool(tools) == ("<tool_call>" in record["completion"]) and all(mask[place] for place in tools)
    for place in range(len(mask)):
        check_values(visit, record, place)
    visit.close()
    return sum(runs)


def check_heads(browser: Any, page: Path) -> None:
    """On a phone no head of the list is cut."""
    visit = Visit(browser, page, "phone")
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.textContent)"
    assert visit.page.eval_on_selector_all("#heads button", cut) == []
    visit.close()


def check_filters(visit: Visit, records: list[dict[str, Any]], step: int) -> None:
    """Filters leave what the file says they should; sorting puts the largest first."""
    page = visit.page
    page.select_option("[name=kind]", "train")
    page.fill("[name=from]", str(step))
    page.fill("[name=to]", str(step))
    visit.wait("#count", f"{len(records):,} of ")
    page.fill("[name=low]", "0.001")
    positive = sum((record.get("advantage") or 0) > 0.001 for record in records)
    visit.wait("#count", f"{positive:,} of ")
    page.fill("[name=low]", "")
    page.click("#heads button:has-text('tokens')")
    first = page.locator("#rows .row").first
    longest = max(len(record["completion_ids"]) for record in records)
    assert str(longest) in first.inner_text().split("\n")
    assert "sort=-length" in page.url and f"from={step}" in page.url


def check_search(visit: Visit, record: dict[str, Any]) -> None:
    """A search finds the sample, and a permalink with it opens as it was."""
    page = visit.page
    word = record["completion" if record.get("images") else "prompt"].strip()[:12]  # the page labels images
    page.fill("#search", word)
    visit.until("word => document.body.dataset.searched === word", word)
    assert " of " in visit.text("#count") and page.locator("#rows .row").count() > 0
    count = visit.text("#count")
    page.reload()
    page.wait_for_selector(READY)
    visit.until("text => document.getElementById('count').textContent === text", count)
    assert page.input_value("#search") == word
    page.fill("#search", "")
    page.click("button[type=reset]")
    visit.until("!document.getElementById('count').textContent.includes(' of ')")


def check_keys(visit: Visit) -> None:
    """Samples, colours, comparison and the help by keyboard alone."""
    page = visit.page
    page.focus("#rows")
    page.keyboard.press("g")
    first = page.url
    page.keyboard.press("j")
    visit.until("address => location.href !== address", first)
    page.keyboard.press("n")
    page.keyboard.press("c")
    visit.until("document.querySelector('[data-colour=logprob]')?.getAttribute('aria-pressed') === 'true'")
    page.select_option("#other", index=1)
    page.wait_for_selector("#difference pre")
    page.keyboard.press("Escape")
    page.focus("#rows")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")


def check_images(browser: Any, page: Path, shots: Path | None = None) -> None:
    """Thumbnails of the prompt are above its text, and those of a tool's answer are in place of its placeholders."""
    sizes = "[...document.querySelectorAll('#detail img')].map((one) => [one.naturalWidth, one.naturalHeight])"
    visit = Visit(browser, page, address="#1/0/0")
    visit.wait("#detail h2", "sample 0")
    visit.until("[...document.querySelectorAll('#detail img')].every((one) => one.complete)")
    assert visit.page.evaluate(sizes) == [[64, 48], [26, 160]]
    assert visit.text("#prompt").startswith("A [image 64×48 ") and visit.page.locator("[data-token]").count() == 3
    visit.page.keyboard.press("n")
    visit.wait("#detail h2", "sample 1")
    visit.until("[...document.querySelectorAll('#detail img')].every((one) => one.complete)")
    assert visit.page.evaluate(sizes) == [[64, 48], [26, 160], [160, 40]]
    assert visit.page.locator("[data-token]").count() == 4  # 8 tokens, 4 of which are the image's
    assert visit.page.locator(".turn.environment figure img").count() == 1
    if shots:
        visit.page.screenshot(path=shots)
    visit.close()


def check_hostile(browser: Any, folder: Path) -> None:
    """Every hostile sample is shown as text, and the page stays as it was."""
    run = inspector_runs.hostile_run(folder / "hostile")
    page = builder.build(run, folder / "hostile_site").page
    for number, text in enumerate(inspector_runs.HOSTILE):
        visit = Visit(browser, page, address=f"#1/0/{number}")
        visit.wait("#detail h2", f"sample {number}")
        visit.page.locator("details summary").first.click()
        shown = visit.page.eval_on_selector("#completion", "element => element.textContent")
        plain = "".join(c for c in text if c.isascii() and c.isprintable())
        assert shown == text or all(part in shown for part in plain.split("  ") if len(part) > 40), shown[:200]
        inside = "document.querySelectorAll('#detail img, #detail script, #detail iframe, #detail b > *').length"
        assert visit.page.evaluate(inside) == 0 and visit.page.evaluate("document.scripts.length") <= 2
        if len(text) > 10_000:
            assert "more tokens" in visit.text("#tokens button")
        visit.page.fill("#search", text[:20].encode("utf-8", "replace").decode())
        visit.until("location.hash.includes('q=')")
        visit.close()
    print("hostile run: no script ran, nothing was fetched")


def check_large(browser: Any, folder: Path, samples: int) -> None:
    """Times and memory; the bounds of the issue are for 100,000 samples."""
    run = inspector_runs.large_run(folder / "large", samples)
    start = time.monotonic()
    built = builder.build(run, folder / "large_site")
    took = time.monotonic() - start
    visit = Visit(browser, built.page)
    start = time.monotonic()
    visit.page.fill("#search", "word17 word4")
    visit.until("document.body.dataset.searched === 'word17 word4'")
    searched = time.monotonic() - start
    client = visit.context.new_cdp_session(visit.page)
    heap = client.send("Runtime.getHeapUsage")
    memory = (heap["usedSize"] + heap.get("backingStorageSize", 0)) / 1e6
    print(f"{samples:,} samples: built in {took:.1f} s ({built.bytes / 1e6:,.0f} MB)")
    print(f"first view {visit.first_view_s:.2f} s, search of all texts {searched:.1f} s ({visit.text('#count')})")
    print(f"heap of the page {memory:.0f} MB")
    visit.close()


def shoot(browser: Any, page: Path, address: str, shots: Path) -> None:
    """Pictures at three sizes, dark and light, of a sample and of the list."""
    shots.mkdir(parents=True, exist_ok=True)
    for size, scheme, at in (
        ("wide", "light", address), ("wide", "dark", address), ("tablet", "light", address),
        ("phone", "light", address), ("phone", "dark", ""),
    ):  # fmt: skip
        visit = Visit(browser, page, size, scheme, at)
        if at:
            for _ in range(3):
                visit.page.keyboard.press("ArrowRight")
        visit.page.screenshot(path=shots / f"{size}_{scheme}{'' if at else '_list'}.png")
        visit.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--samples", type=int, default=0, help="of the large run; default: none is made")
    parser.add_argument("--shots", type=Path, help="for pictures of the first run")
    parser.add_argument("--at", default="", help="what the pictures show, for instance #30/3/2?colour=logprob")
    parser.add_argument("--chromium", type=Path, default=Path.home() / ".cache" / "gdpo_nemo" / "chromium")
    given = parser.parse_args()
    program = chromium.fetched(given.chromium)
    with chromium.browser(program) as browser, tempfile.TemporaryDirectory() as temporary:
        print(f"Chromium {browser.version}", flush=True)
        folder = Path(temporary)
        for number, run in enumerate(given.runs):
            page = builder.build(run, folder / f"site{number}").page
            check_run(browser, run, page)
            check_heads(browser, page)
            turns = check_turns(browser, run, page)
            conversation = f", a conversation of {turns} turns" if turns else ""
            print(f"{run}: filters, search, permalinks, tokens, keys{conversation}", flush=True)
            if given.shots and number == 0:
                shoot(browser, page, given.at, given.shots)
        check_hostile(browser, folder)
        if given.samples:
            check_large(browser, folder, given.samples)


if __name__ == "__main__":
    sys.exit(main())
