"""The chat page in headless Chromium, driven by chromedriver over W3C WebDriver."""

import shutil
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest
import served
import small_llm
from executorch_mlx.llm import LLM

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium with its chromedriver here")

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
ENTER = "\ue007"


class Page:
    """A browser with one page."""

    def __init__(self, session: httpx.Client, prefix: str):
        self._session, self._prefix = session, prefix

    def _post(self, path: str, body: dict):
        response = self._session.post(f"{self._prefix}/{path}", json=body)
        response.raise_for_status()
        return response.json()["value"]

    def open(self, url: str) -> None:
        self._post("url", {"url": url})

    def js(self, expression: str):
        return self._post("execute/sync", {"script": f"return {expression}", "args": []})

    def type(self, selector: str, text: str) -> None:
        (element,) = self._post("element", {"using": "css selector", "value": selector}).values()
        self._post(f"element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        (element,) = self._post("element", {"using": "css selector", "value": selector}).values()
        self._post(f"element/{element}/click", {})

    def messages(self) -> list[tuple[str, str]]:
        """The role and the text of each message on the page."""
        pairs = "[...document.querySelectorAll('#chat > div')].map(d => [d.className, d.textContent])"
        return [tuple(pair) for pair in self.js(pairs)]

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + 60
        while not self.js(expression):
            assert time.monotonic() < deadline, (expression, self.messages())
            time.sleep(0.05)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    log = tmp_path_factory.mktemp("chromedriver") / "log"
    process = subprocess.Popen([DRIVER, "--port=0", f"--log-path={log}"], stdout=subprocess.PIPE, text=True)
    try:
        port = next(line.split()[-1].rstrip(".") for line in process.stdout if "started successfully on port" in line)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as session:
            options = {"binary": BROWSER, "args": FLAGS}
            body = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
            response = session.post("/session", json=body)
            response.raise_for_status()
            prefix = f"/session/{response.json()['value']['sessionId']}"
            yield Page(session, prefix)
            session.delete(prefix)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def page(browser, server) -> Page:
    browser.open(f"{server.url}/")
    browser.until("model !== null")
    return browser


def test_title_is_the_name_of_the_model(page):
    assert page.js("document.getElementById('notice').hidden")
    assert page.js("document.title") == page.js("document.getElementById('model').textContent") == "small"


def test_chat_of_two_turns(page, llm):
    page.js("(document.getElementById('temperature').value = 0, document.getElementById('max-tokens').value = 9)")
    page.type("#text", "Return" + ENTER)
    page.until("document.getElementById('state').textContent.startsWith('9 tokens')")
    messages = [{"role": "user", "content": "Return"}]
    first = llm.chat(messages, max_new_tokens=9).result().text
    page.until("running === null")
    assert page.messages() == [("user", "Return"), ("assistant", first)]
    page.type("#text", "More")
    page.click("#send")
    page.until("messages.length === 4")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "More"}]
    assert page.messages()[3] == ("assistant", llm.chat(messages, max_new_tokens=9).result().text)
    page.click("#clear")
    assert page.messages() == [] and page.js("messages.length") == 0


def test_stop_button_cancels_the_answer(page, server, monkeypatch):
    monkeypatch.setattr(server, "delay", 0.01)
    page.js("document.getElementById('max-tokens').value = ''")
    page.type("#text", "Go on" + ENTER)
    page.until("document.querySelector('.assistant')?.textContent.length > 10")
    assert page.js("document.getElementById('send').textContent") == "Stop"
    page.click("#send")
    page.until("running === null && document.getElementById('state').textContent === 'stopped'")
    generation = server.generations[-1]
    deadline = time.monotonic() + 60
    while generation.finish is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert generation.finish == "cancelled" and len(generation.tokens) < small_llm.CONTEXT - 10
    page.click("#clear")


def test_error_is_shown_and_its_message_dropped(page):
    page.js("document.getElementById('max-tokens').value = 5")
    page.js("document.getElementById('text').value = 'x '.repeat(2000)")
    page.click("#send")
    page.until("document.querySelector('.error') !== null")
    assert f"tokens, expected 1 to {small_llm.CONTEXT}" in page.js("document.querySelector('.error').textContent")
    assert page.js("messages.length") == 0


def test_without_a_chat_template_the_page_continues_each_text(browser, tmp_path):
    program = small_llm.export(tmp_path / "plain.pte", tokenizer=small_llm.tokenizer(template=None))
    with served.serve(program) as server:
        browser.open(f"{server.url}/")
        browser.until("model !== null")
        assert "no chat template" in browser.js("document.getElementById('notice').innerText")
        browser.js("(document.getElementById('temperature').value = 0, document.getElementById('max-tokens').value = 9)")
        llm = LLM.load(program)
        expected = []
        for text in ("Return ", "More"):
            browser.type("#text", text + ENTER)
            browser.until("running === null && document.getElementById('state').textContent.startsWith('9 tokens')")
            expected += [("user", text), ("assistant", llm.generate(text, max_new_tokens=9).result().text)]
            assert browser.messages() == expected
            browser.js("document.getElementById('state').textContent = ''")
        assert server.generations[-1].metrics.prompt_tokens == len(llm.encode("More"))
