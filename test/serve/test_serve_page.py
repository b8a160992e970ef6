"""The chat page in headless Chromium, driven by chromedriver over W3C WebDriver."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

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
        self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def js(self, expression: str):
        return self._post("execute/sync", {"script": f"return {expression}", "args": []})

    def type(self, selector: str, text: str) -> None:
        (element,) = self._post("element", {"using": "css selector", "value": selector}).values()
        self._post(f"element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        (element,) = self._post("element", {"using": "css selector", "value": selector}).values()
        self._post(f"element/{element}/click", {})

    def shown_messages(self) -> list[tuple[str, str]]:
        """The role and the rendered text of each message on the page."""
        pair = "[message.classList[0], message.querySelector('.body').textContent]"
        pairs = self.js(f"[...document.querySelectorAll('#chat > div')].map(message => {pair})")
        return [tuple(pair) for pair in pairs]

    def stored_messages(self) -> list[tuple[str, str]]:
        """The role and the Markdown text of each message in the variable `messages` of the page."""
        return [(message["role"], message["content"]) for message in self.js("messages")]

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + 60
        while not self.js(expression):
            assert time.monotonic() < deadline, (expression, self.shown_messages())
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
    assert page.stored_messages() == [("user", "Return"), ("assistant", first)]
    page.type("#text", "More")
    page.click("#send")
    page.until("messages.length === 4")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "More"}]
    assert page.stored_messages()[3] == ("assistant", llm.chat(messages, max_new_tokens=9).result().text)
    page.click("#clear")
    assert page.shown_messages() == [] and page.js("messages.length") == 0


def test_stop_button_cancels_the_answer(page, server, monkeypatch):
    monkeypatch.setattr(server, "delay", 0.01)
    page.js("document.getElementById('max-tokens').value = ''")
    page.type("#text", "Go on" + ENTER)
    page.until("document.querySelector('.assistant .body')?.textContent.length > 10")
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


def test_new_chat_during_an_answer_begins_empty(page, server, monkeypatch):
    monkeypatch.setattr(server, "delay", 0.01)
    page.js("document.getElementById('max-tokens').value = ''")
    page.type("#text", "Go on" + ENTER)
    page.until("document.querySelector('.assistant .body')?.textContent.length > 10")
    page.click("#clear")
    page.until("running === null && document.getElementById('send').textContent === 'Send'")
    assert page.shown_messages() == [] and page.stored_messages() == []
    assert page.js("document.getElementById('state').textContent") == ""


def test_error_is_shown_and_the_failed_message_leaves_the_chat(page):
    page.js("document.getElementById('max-tokens').value = 5")
    page.js("document.getElementById('text').value = 'x '.repeat(2000)")
    page.click("#send")
    page.until("document.querySelector('.error') !== null")
    page.until("running === null")
    assert f"tokens, expected 1 to {small_llm.CONTEXT}" in page.js("document.querySelector('.error').textContent")
    assert page.js("messages.length") == 0


def test_without_a_chat_template_the_page_continues_each_text(browser, tmp_path):
    program = small_llm.export(tmp_path / "plain.pte", tokenizer=small_llm.tokenizer(template=None))
    with served.serve(program) as server:
        browser.open(f"{server.url}/")
        browser.until("model !== null && !document.getElementById('notice').hidden")
        assert "no chat template" in browser.js("document.getElementById('notice').innerText")
        browser.js(
            "(document.getElementById('temperature').value = 0, document.getElementById('max-tokens').value = 9)"
        )
        llm = LLM.load(program)
        expected = []
        for text in ("Return ", "More"):
            browser.type("#text", text + ENTER)
            browser.until("running === null && document.getElementById('state').textContent.startsWith('9 tokens')")
            expected += [("user", text), ("assistant", llm.generate(text, max_new_tokens=9).result().text)]
            assert browser.stored_messages() == expected
            browser.js("document.getElementById('state').textContent = ''")
        assert server.generations[-1].metrics.prompt_tokens == len(llm.encode("More"))


def test_regenerate_and_edit(page):
    page.click("#clear")
    page.js("document.getElementById('max-tokens').value = 6")
    page.type("#text", "Return" + ENTER)
    page.until("running === null && messages.length === 2")
    page.click(".assistant .actions button")
    page.until("running === null && messages.length === 2")
    assert [role for role, _ in page.stored_messages()] == ["user", "assistant"] and len(page.shown_messages()) == 2
    page.click(".user .actions button")
    assert page.stored_messages() == [] and page.shown_messages() == []
    assert page.js("document.getElementById('text').value") == "Return"
    page.js("document.getElementById('text').value = ''")


def test_answers_are_markdown_without_scripts(page):
    text = "**bold**\\n\\n```python\\nx = 1\\n```\\n<img src=x onerror=alert(1)><script>bad = 1</script>"
    escaped = text.replace("</", "<\\/")
    page.js(f"render(addMessage('assistant', ''), {{ text: '{escaped}', reasoning: 'hm', tokens: [] }})")
    html = page.js("document.querySelector('.assistant .body').innerHTML")
    assert "<strong>bold</strong>" in html and 'class="language-python"' in html
    assert "<script" not in html and "onerror" not in html and page.js("typeof bad") == "undefined"
    assert page.js("document.querySelector('.reasoning').textContent") == "hm"
    page.click("#clear")


def show(page, text: str) -> None:
    """Show an answer with this text."""
    page.js(f"render(addMessage('assistant', ''), {{ text: {json.dumps(text)}, reasoning: '', tokens: [] }})")


def answer_with(page, response: str) -> None:
    """Send a message. The server's answer to it is `response`, an expression in JavaScript."""
    page.js(f"(window.fetch = async () => {response}, send('Go on'))")
    page.until("running === null")


def test_answers_cannot_stand_in_for_controls_of_the_page(page):
    show(page, "<input id=text> <b id=state>x</b> <a name=send>y</a> <button>z</button>")
    assert page.js("document.getElementById('text').tagName") == "TEXTAREA"
    assert page.js("document.getElementById('state').getAttribute('role')") == "status"
    assert page.js("document.querySelectorAll('#chat [id], #chat [name], #chat button').length") == 0


def test_links_of_answers_open_a_page_of_their_own(page):
    show(page, "See [this](https://example.com).")
    assert page.js("[document.querySelector('#chat a').target, document.querySelector('#chat a').rel]") == [
        "_blank",
        "noopener noreferrer",
    ]


def test_formulas_are_shown(page):
    formulas = [r"\( a_1*b*c < d_1 \)", "$x_1 + y_1$", "\\[\nx_1\n= y\n- z\n\n\\]", "$$ e_1 $$"]
    show(page, "It *is*\n\n" + "\n\n".join(formulas) + "\n\nfor $5 or $6, not `$a$` or $\\unknown{$.")
    given = page.js("[...document.querySelectorAll('.formula')].map(e => [e.title, e.querySelector('math')?.display])")
    shown = [title for title, _ in given]
    assert shown == [*formulas, ""] and [bool(e) for e in given] == [True] * 5
    assert page.js("document.querySelectorAll('.formula math').length") == 4
    assert page.js("document.querySelectorAll('.formula math[display=block]').length") == 2
    text = page.js("document.querySelector('.assistant .body').textContent")
    assert "for $5 or $6, not $a$ or $\\unknown{$." in text
    assert page.js("document.querySelectorAll('.assistant em').length") == 1


def test_code_is_highlighted_and_can_be_copied(page):
    show(page, "```python\nx = 'a < b'  # <b>\n```\n\n```unknown\nx\n```")
    codes = page.js(
        "[...document.querySelectorAll('pre > code')].map(e => [e.textContent, e.querySelectorAll('span').length])"
    )
    assert codes[0] == ["x = 'a < b'  # <b>\n", 2] and codes[1] == ["x\n", 0]
    page.js("(navigator.clipboard.writeText = async text => { window.copied = text; })")
    page.click("pre > .copy")
    page.until("window.copied !== undefined")
    assert page.js("copied") == "x = 'a < b'  # <b>\n"


def test_reasoning_is_collapsed_when_the_answer_begins(page):
    page.js("(window.div = addMessage('assistant', ''), render(div, { text: '', reasoning: 'hm', tokens: [] }))")
    assert page.js("document.querySelector('.thoughts').open")
    page.js("render(div, { text: 'Hi', reasoning: 'hm', tokens: [] })")
    assert not page.js("document.querySelector('.thoughts').open")
    page.js(
        "(document.querySelector('.thoughts').open = true, render(div, { text: 'Hi!', reasoning: 'hm', tokens: [] }))"
    )
    assert page.js("document.querySelector('.thoughts').open")


def chat_once(page, text: str) -> None:
    page.js("$('max-tokens').value = 4")
    page.type("#text", text + ENTER)
    page.until("running === null && messages.length >= 2 && document.getElementById('text').value === ''")


def test_conversations_stay_in_the_browser(page, server):
    page.js("localStorage.clear()")
    page.js("$('system').value = 'Be kind.'")
    chat_once(page, "First")
    stored = page.stored_messages()
    assert server.llm.tokenizer.decode(server.generations[-1].prompt).startswith("Be kind.\nFirst")
    page.click("#clear")
    assert page.stored_messages() == []
    chat_once(page, "Second")
    page.open(page.js("location.href"))  # another visit
    page.until("model !== null && $('conversations').options.length === 3")
    assert page.js("[...$('conversations').options].map(e => e.text)") == ["new chat", "Second", "First"]
    page.js("($('conversations').selectedIndex = 2, $('conversations').dispatchEvent(new Event('change')))")
    assert page.stored_messages() == stored and len(page.shown_messages()) == 2
    assert page.js("$('system').value") == "Be kind."
    chat_once(page, "More")  # it goes on
    assert len(page.stored_messages()) == 4
    exported = page.js("JSON.stringify(conversations.load())")
    assert [len(entry["messages"]) for entry in json.loads(exported)] == [4, 2]
    page.js("$('delete').click()")
    assert page.js("conversations.load().length") == 1 and page.shown_messages() == []
    page.js(f"importChats({json.dumps(exported)})")
    assert page.js("JSON.stringify(conversations.load())") == exported
    page.js("importChats('[1]')")
    assert page.js("$('state').textContent") == "the file has no chats of this page"
    assert page.js("JSON.stringify(conversations.load())") == exported
    page.js("(localStorage.clear(), $('system').value = '', clear())")


def test_a_full_store_drops_the_oldest_conversations(page):
    page.js("localStorage.clear()")
    entry = "{ id: String(n), title: '', messages: [{ role: 'user', content: 'x'.repeat(1e6) }] }"
    page.js(f"[1, 2, 3, 4, 5, 6, 7].forEach(n => conversations.put({entry}))")
    ids = page.js("conversations.load().map(entry => entry.id)")
    assert ids[0] == "7" and 1 < len(ids) < 7 and ids == sorted(ids, reverse=True)
    page.js("localStorage.clear()")


def test_context_meter(page):
    assert page.js("$('context-label').hidden")
    chat_once(page, "Hello")
    used = page.js("$('context').value")
    assert page.js("$('used').textContent") == f"{used:.0f} of {small_llm.CONTEXT} tokens" and 4 < used < 60
    page.click("#clear")
    assert page.js("$('context-label').hidden")


def test_all_sampling_parameters_are_sent(page):
    values = {"temperature": 0.5, "top-p": 0.9, "top-k": 5, "min-p": 0.1, "seed": 7, "max-tokens": 3}
    values |= {"repetition-penalty": 1.5, "presence-penalty": 0.5, "frequency-penalty": -0.5}
    for id, value in values.items():
        page.js(f"$('{id}').value = {value}")
    page.js("($('stop').value = 'x', messages = [{ role: 'user', content: 'Hi' }])")
    body = page.js("requestBody()")
    expected = {id.replace("-", "_"): value for id, value in values.items()} | {"stop": ["x"]}
    assert body | expected == body and body["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_failed_message_can_be_sent_again(page):
    chat_once(page, "Hello")
    before = page.shown_messages()
    answer_with(page, "new Response('{}', { status: 500 })")
    assert page.shown_messages() == [*before, ("error", "the server answers with HTTP 500")]
    assert page.js("$('text').value") == "Go on" and len(page.stored_messages()) == 2
    page.js("$('text').value = ''")


def test_paragraphs_have_the_direction_of_their_script(page):
    show(page, "שלום, עולם!\n\nHello, world!")
    styles = "[...document.querySelectorAll('.assistant p')].map(e => getComputedStyle(e).unicodeBidi)"
    assert page.js(styles) == ["plaintext"] * 2
    assert page.js("document.querySelector('.assistant .body').dir") == page.js("$('text').dir") == "auto"


def test_the_page_does_not_scroll_if_the_user_has_scrolled_up(page, server, monkeypatch):
    monkeypatch.setattr(server, "delay", 0.02)
    page.js("addMessage('user', 'line\\n'.repeat(200))")
    page.js("document.getElementById('max-tokens').value = 30")
    page.type("#text", "Go on" + ENTER)
    page.until("document.querySelector('.assistant .body')?.textContent.length > 3")
    assert page.js("$('chat').scrollTop") > 0
    page.js("$('chat').scrollTop = 0")
    page.until("running === null")
    assert page.js("$('chat').scrollTop") == 0


def test_answers_are_rendered_once_in_a_frame(page):
    page.js("(window.requestAnimationFrame = () => 1, window.count = 0, window.rendered = render)")
    page.js("window.render = (...given) => { count += 1; rendered(...given); }")
    events = "".join(f'data: {{"choices": [{{"delta": {{"content": "{i} "}}}}]}}\n\n' for i in range(20))
    answer_with(page, f"new Response({json.dumps(events)})")
    assert page.js("count") == 1 and page.shown_messages()[1][1].split() == [str(i) for i in range(20)]


def test_reasoning_stays_if_there_is_no_room_for_an_answer(page):
    events = 'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
    events += 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
    events += 'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    answer_with(page, f"new Response({json.dumps(events)})")
    assert page.js("document.querySelector('.reasoning').textContent") == "hm"
    assert page.stored_messages() == [("user", "Go on"), ("assistant", "")]
    assert page.js("$('state').textContent").endswith("cut off")


@pytest.mark.parametrize(
    "response, message",
    [
        ("Promise.reject(new TypeError('Failed to fetch'))", "the server does not answer"),
        ("new Response('<html>', { status: 502 })", "the server answers with HTTP 502"),
    ],
)
def test_errors_of_the_network_are_shown(page, response, message):
    answer_with(page, response)
    assert page.shown_messages()[-1] == ("error", message)


def test_tokens_are_shaded_on_request(page):
    page.js("(document.getElementById('shading').checked = true, document.getElementById('max-tokens').value = 5)")
    page.type("#text", "Return" + ENTER)
    page.until("running === null && document.querySelectorAll('.token').length === 5")
    assert "probability" in page.js("document.querySelector('.token').title")
    page.js("document.getElementById('shading').checked = false")
    page.click("#clear")


def test_every_control_has_a_name(page):
    """For screen readers: a label, a text or aria-label."""
    unnamed = "[...document.querySelectorAll('button, input, select, textarea')].filter(e => !e.labels?.length && "
    unnamed += "!e.textContent.trim() && !e.ariaLabel).map(e => e.id)"
    assert page.js(unnamed) == []
    assert page.js("document.getElementById('chat').getAttribute('role')") == "log"


def test_phone_width_and_dark_mode(page):
    page._post("window/rect", {"width": 400, "height": 700})
    page.js("addMessage('user', 'word '.repeat(50) + 'x'.repeat(300))")
    assert page.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page._post(
        "goog/cdp/execute",
        {
            "cmd": "Emulation.setEmulatedMedia",
            "params": {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
        },
    )
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    page.click("#clear")
    page._post("window/rect", {"width": 1000, "height": 800})


def screenshot(page, tmp_path, name: str, height: int) -> None:
    """`SCREENSHOT=1 pytest` writes the pictures in the docs."""
    target = Path(__file__).parents[2] / "docs" / "figures" if os.environ.get("SCREENSHOT") else tmp_path
    page._post("window/rect", {"width": 760, "height": height})
    picture = base64.b64decode(page._session.get(f"{page._prefix}/screenshot").json()["value"])
    (target / name).write_bytes(picture)
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_screenshot_of_an_answer(page, tmp_path):
    page.click("#clear")
    answer = (
        "Calls go through **`openai`**:\n\n```python\nimport openai\n\nclient = openai.OpenAI(base_url=url)\n```\n\n"
        "A token with logit $l_i$ has the probability\n\n$$ p_i = \\frac{e^{l_i / T}}{\\sum_j e^{l_j / T}} $$"
    )
    page.js("addUserMessage('How do I call the server, and what is the temperature?', 0)")
    given = json.dumps({"text": answer, "reasoning": "Two questions.", "tokens": []})
    page.js(f"(messages = [{{}}, {{ content: '' }}], window.div = addMessage('assistant', ''), render(div, {given}))")
    page.js("(addAnswerActions(div, 0), showContext(120))")
    screenshot(page, tmp_path, "chat-page.png", 740)
    page.click("#clear")


def test_screenshot_of_the_settings(page, tmp_path):
    page.click("#clear")
    page.js("(localStorage.clear(), $('system').value = 'You are a pirate.')")
    page.js("document.querySelectorAll('header details').forEach(e => { e.open = true; })")
    page.js("addUserMessage('Hello', 0)")
    given = json.dumps({"text": "Ahoy, matey!", "reasoning": "", "tokens": []})
    page.js(f"(window.div = addMessage('assistant', ''), render(div, {given}), showContext(40))")
    screenshot(page, tmp_path, "chat-page-settings.png", 740)
    page.js("($('system').value = '', clear())")
