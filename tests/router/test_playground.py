"""The page at ``/``, used with a keyboard in a headless browser, and what is served of it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from antiphon.router.byte_format import ARGUMENTS, CONTENT, REASONING, TOOL, byte_answer
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.pages import FOLDER, PAGE_PATHS
from antiphon.router.served_model import ServedModel

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
in_browser = pytest.mark.skipif(
    CHROMIUM is None or CHROMEDRIVER is None, reason="chromium and chromedriver are not installed"
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--window-size=1280,860",
)
ANSWER = (
    "Here **it** is:\n\n```python\nprint('<b>x</b>')\n```\n\n- one\n- two `2`\n\n<img src=x onerror=alert(1)>"
)


ENDLESS = ServedModel(name="tiny", max_context_tokens=200_000, created=0, fingerprint="fp")


class Page:
    """The page as its user sees it. Calls block: they belong into a thread."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def wait(self, selector: str, text: str = "", seconds: float = 60) -> str:
        """Text of the last visible match, once it holds ``text``."""

        def found(driver: WebDriver) -> str | bool:
            shown = [e.text for e in driver.find_elements(By.CSS_SELECTOR, selector) if e.is_displayed()]
            return shown[-1] if shown and text in shown[-1] else False

        # What streams in replaces elements between their being found and being read.
        waiting = WebDriverWait(self.driver, seconds, 0.05, [StaleElementReferenceException])
        return waiting.until(found, f"{selector}: {text!r}")

    def type(self, *keys: str) -> None:
        """Keys to whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def gone(self, selector: str) -> None:
        """Wait until nothing matches."""
        waiting = WebDriverWait(self.driver, 60, poll_frequency=0.05)
        waiting.until(lambda _: not self.count(selector), f"{selector} is still there")

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def ask(self, text: str) -> None:
        self.type(text, Keys.ENTER)
        self.wait(".user:last-of-type", text)

    def answered(self) -> None:
        self.wait('.answer:last-of-type[aria-busy="false"]')

    def complaints(self) -> list[str]:
        """What the browser's console holds: script errors, blocked loads."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    yield driver
    driver.quit()


async def test_files_are_served_with_a_strict_policy(deploy, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    deployment = await deploy(api_key_file=str(keys))
    assert {"/", "/docs", "/playground/main.js", "/playground/style.css"} <= PAGE_PATHS
    for path in PAGE_PATHS:
        response = await deployment.http.get(path)
        assert response.status_code == 200, path
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        again = await deployment.http.get(path, headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == 304
        assert again.content == b""
    assert (await deployment.http.get("/playground/../server.py")).status_code in (401, 404)
    assert (await deployment.http.get("/v1/models")).status_code == 401


def test_pages_refer_to_what_exists_and_to_nothing_elsewhere():
    for file in FOLDER.iterdir():
        text = file.read_text()
        assert not re.search(r"(src|href|from|import|url)\W{1,3}https?://", text), file.name
        for path in re.findall(r'"(/playground/[a-z.]+)"', text):
            assert path in PAGE_PATHS, (file.name, path)
        for name in re.findall(r'from "\./([a-z.]+)"', text):
            assert (FOLDER / name).is_file(), (file.name, name)


async def test_workers_are_named_in_a_header(deploy):
    deployment = await deploy(ScriptedGateway(lambda _: byte_answer((CONTENT, "a")), prefill=1, decode=1))
    for stream in (False, True):
        assert (await deployment.chat(stream=stream)).headers["x-antiphon-workers"] == "d0, p0"


@in_browser
async def test_a_conversation(deploy, driver, tmp_path):
    workers = ScriptedGateway(lambda _: byte_answer((REASONING, "I think."), (CONTENT, ANSWER)))
    workers.step_s = 0.005
    workers.cached_tokens = 7
    deployment = await deploy(workers)

    def use() -> None:
        page = Page(driver)
        driver.get(deployment.server.url)
        page.wait("#status", "ready")
        assert page.wait("#model") == "tiny"
        page.ask("Show me code")
        page.wait(".reasoning", "I think.")
        page.answered()
        assert page.wait(".answer pre code") == "print('<b>x</b>')"
        assert page.wait(".answer strong") == "it"
        assert [e.text for e in driver.find_elements(By.CSS_SELECTOR, ".answer li")] == ["one", "two 2"]
        # What a model writes is text, whatever it looks like.
        assert page.count(".answer img") == 0
        assert "<img src=x" in page.wait(".answer .text")
        figures = page.wait(".figures")
        assert re.search(r"First token\n\d+ ms", figures)
        assert re.search(r"Speed\n[\d.]+ tokens/s", figures)
        assert f"Output\n{len(byte_answer((REASONING, 'I think.'), (CONTENT, ANSWER)))} tokens" in figures
        assert "8 reasoning" in figures
        assert "7 cached" in figures
        assert "Served by\nd0 · p0" in figures
        # The next turn, without touching the mouse: the focus is where one types.
        page.ask("More")
        page.wait(".answer:nth-of-type(2)")
        page.answered()
        driver.save_screenshot(str(tmp_path / "conversation.png"))
        page.type(Keys.ALT, "n")
        page.gone(".answer")
        assert not page.complaints()

    await asyncio.to_thread(use)
    last = bytes(workers.workers["d0"].sent[-1].prompt_token_ids).decode()
    assert last == f"user: Show me code\nassistant: {ANSWER}\nuser: More\nassistant: "


@in_browser
async def test_tool_calls_are_answered_on_the_page(deploy, driver):
    call = byte_answer((TOOL, "get_weather"), (ARGUMENTS, '{"city":"Oslo"}'))
    done = byte_answer((CONTENT, "Cold."))
    workers = ScriptedGateway(lambda request: done if b"tool: " in bytes(request.prompt_token_ids) else call)
    deployment = await deploy(workers)

    def use() -> None:
        page = Page(driver)
        driver.get(deployment.server.url)
        driver.execute_script("localStorage.clear()")
        driver.refresh()  # which waits until it is loaded
        page.wait("#status", "ready")
        driver.find_element(By.ID, "sample-tool").click()
        driver.find_element(By.CSS_SELECTOR, "#settings input[value=low] + span").click()
        driver.find_element(By.ID, "prompt").click()
        page.ask("Weather?")
        assert page.wait(".call h3") == "get_weather"
        assert json.loads(page.wait(".call pre")) == {"city": "Oslo"}
        page.type("minus 5", Keys.TAB, Keys.ENTER)
        page.wait(".answer:last-of-type .text", "Cold.")
        page.answered()
        page.gone(".results button")
        assert not page.complaints()
        # What was set is there again after a reload.
        driver.refresh()
        assert "get_weather" in driver.find_element(By.ID, "tools").get_property("value")
        driver.execute_script("localStorage.clear()")

    await asyncio.to_thread(use)
    last = bytes(workers.workers["d0"].sent[-1].prompt_token_ids).decode()
    assert "tool: minus 5\n" in last


@in_browser
async def test_stopping_and_errors(deploy, driver, until):
    workers = ScriptedGateway(lambda _: byte_answer((CONTENT, "x" * 100_000)))
    workers.step_s = 0.02
    deployment = await deploy(workers, ENDLESS)

    def stop() -> None:
        page = Page(driver)
        driver.get(deployment.server.url)
        page.wait("#status", "ready")
        page.ask("Go on for long")
        page.wait(".answer .text", "xxx")
        page.type(Keys.ESCAPE)
        assert page.wait(".answer .error") == "Stopped."

    def fail() -> None:
        page = Page(driver)
        driver.find_element(By.ID, "tools").send_keys("[")
        driver.find_element(By.ID, "prompt").click()
        page.ask("With broken tools")
        page.wait(".answer:last-of-type .error", "not valid JSON")
        driver.find_element(By.ID, "tools").clear()
        driver.find_element(By.ID, "max_tokens").send_keys("0")
        driver.find_element(By.ID, "prompt").click()
        page.ask("With a bad field")
        page.wait(".answer:last-of-type .error", "max_tokens")
        driver.execute_script("localStorage.clear()")
        # The browser mentions the refused request, and nothing else.
        assert all("400" in complaint for complaint in page.complaints())

    await asyncio.to_thread(stop)
    # The server was told: nobody decodes for a reader that has left.
    await until(lambda: not workers.workers["d0"].requests)
    await asyncio.to_thread(fail)


@in_browser
async def test_themes_and_the_reference(deploy, driver):
    deployment = await deploy()

    def use() -> None:
        page = Page(driver)
        driver.get(deployment.server.url)
        page.wait("#status", "ready")
        before = driver.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        driver.find_element(By.ID, "theme").click()
        after = driver.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        assert before != after
        driver.find_element(By.LINK_TEXT, "API reference").click()
        page.wait(".operation .path", "/")
        assert driver.find_element(By.TAG_NAME, "body").value_of_css_property("background-color") == after
        paths = [e.text for e in driver.find_elements(By.CSS_SELECTOR, ".operation .path")]
        assert "/v1/chat/completions" in paths
        driver.find_element(By.CSS_SELECTOR, ".operation summary").click()
        page.wait(".operation[open] table:first-of-type", "messages")
        driver.execute_script("localStorage.clear()")
        assert not page.complaints()

    await asyncio.to_thread(use)
