"use strict";
const $ = id => document.getElementById(id);
let messages = [], model = null, running = null; // running: the AbortController of the current request
let hasTemplate = true; // whether the model has a chat template; otherwise each message is the prompt of a completion
let key = sessionStorage.getItem("key");

// What an answer may not contain. An id or a name could be that of a control of this page.
const SANITIZE = {
  FORBID_TAGS: ["img", "style", "form", "button", "select", "textarea"], FORBID_ATTR: ["id", "name", "style"] };
DOMPurify.addHook("afterSanitizeAttributes", node => { // a link in the same tab would end the chat
  if (node.nodeName.toLowerCase() === "a") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

// Formulas in LaTeX stay as they are. Markdown would take their backslashes, underscores and lines for its own.
const DISPLAYED = /\$\$[^]+?\$\$|\\\[[^]+?\\\]/.source, IN_TEXT = /\\\([^]+?\\\)|\$(?! )[^$`\n]+?(?<! )\$(?!\d)/.source;
const escaped = text => text.replace(/[&<>]/g, character => `&#${character.charCodeAt()};`);
const formulas = (level, start, pattern, toHtml) => ({
  name: `${level}-formula`, level,
  start: source => source.match(start)?.index,
  tokenizer(source) {
    const raw = pattern.exec(source)?.[0];
    if (raw) return { type: `${level}-formula`, raw };
  },
  renderer: ({ raw }) => toHtml(escaped(raw)),
});
marked.use({ extensions: [
  formulas("block", /\n {0,3}(\$\$|\\\[)/, new RegExp(`^ {0,3}(${DISPLAYED}) *(\\n|$)`), html => `<p>${html}</p>`),
  formulas("inline", /\$|\\[([]/, new RegExp(`^(${DISPLAYED}|${IN_TEXT})`), html => html),
] });

// Calls the API. Asks for the API key if the server wants one.
async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers }).catch(error => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  });
  if (response.status === 401) {
    const given = prompt("API key");
    if (given) {
      sessionStorage.setItem("key", key = given);
      return call(path, options);
    }
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null); // a proxy's error may be of another form
    throw new Error(body?.error?.message ?? `the server answers with HTTP ${response.status}`);
  }
  return response;
}

function selectModel(entry) {
  ({ id: model, has_chat_template: hasTemplate } = entry);
  $("model").textContent = document.title = model;
  $("notice").hidden = hasTemplate;
  const hidesShading = entry.capabilities?.logprobs === false;
  $("shading").parentElement.hidden = hidesShading;
  if (hidesShading) $("shading").checked = false;
  $("text").placeholder = hasTemplate ? "Message" : "Text to continue";
  $("clear").textContent = hasTemplate ? "New chat" : "Clear";
  $("max-tokens").value = hasTemplate ? "" : 200;
  $("max-tokens").placeholder = hasTemplate ? "no limit" : "16"; // the default of /v1/completions
}

call("/v1/models").then(r => r.json()).then(list => {
  $("models").replaceChildren(...list.data.map(entry => new Option(entry.id)));
  $("models-label").hidden = list.data.length < 2;
  $("models").addEventListener("change", () => { clear(); selectModel(list.data[$("models").selectedIndex]); });
  selectModel(list.data[0]);
}).catch(error => addMessage("error", error.message));

// Adds a message to the page, and returns its element. `role` is user, assistant or error.
function addMessage(role, text) {
  const div = document.createElement("div"), body = document.createElement("div");
  div.className = hasTemplate ? role : `${role} plain`;
  body.className = "body";
  body.dir = "auto";
  body.textContent = text;
  div.append(body);
  $("chat").append(div);
  div.scrollIntoView({ block: "end" });
  return div;
}

function addActions(div, actions) {
  const bar = document.createElement("div");
  bar.className = "actions";
  for (const [name, run] of Object.entries(actions)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", run);
    bar.append(button);
  }
  div.append(bar);
}

// Makes a change that lengthens messages. The end of the last message stays visible if it was.
function keepEnd(change) {
  const chat = $("chat"), isAtEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 40;
  change();
  if (isAtEnd) chat.scrollTop = chat.scrollHeight;
}

// Renders an answer: as markdown, or with a shade for the probability of each token.
function render(div, answer) {
  const body = div.querySelector(".body");
  if (answer.tokens.length) {
    body.replaceChildren(...answer.tokens.map(({ token, logprob }) => {
      const span = document.createElement("span"), p = Math.exp(logprob);
      span.className = "token";
      span.textContent = token;
      span.title = `probability ${(100 * p).toFixed(1)} %`;
      span.style.backgroundColor = `rgb(220 38 38 / ${(0.6 * (1 - p)).toFixed(2)})`;
      return span;
    }));
    div.classList.add("plain");
  } else if (hasTemplate) {
    body.innerHTML = DOMPurify.sanitize(marked.parse(answer.text), SANITIZE);
  } else body.textContent = answer.text;
  if (!answer.reasoning) return;
  let reasoning = div.querySelector(".reasoning");
  if (!reasoning) {
    reasoning = document.createElement("div");
    reasoning.className = "reasoning";
    reasoning.dir = "auto";
    div.prepend(reasoning);
  }
  reasoning.textContent = answer.reasoning;
}

// Yields the JSON of each server-sent event.
async function* events(response) {
  let rest = "";
  for (const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();;) {
    const { value, done } = await reader.read();
    if (done) return;
    const complete = (rest + value).split("\n\n");
    rest = complete.pop();
    for (const event of complete)
      if (event.startsWith("data: {")) yield JSON.parse(event.slice("data: ".length));
  }
}

function requestBody() {
  const prompt = hasTemplate ? { messages } : { prompt: messages.at(-1).content };
  const body = { model, ...prompt, stream: true, stream_options: { include_usage: true } };
  const fields = {
    temperature: "temperature", "top-p": "top_p", "top-k": "top_k", seed: "seed", "max-tokens": "max_tokens" };
  for (const [id, name] of Object.entries(fields)) if ($(id).value) body[name] = Number($(id).value);
  if ($("shading").checked) body.logprobs = hasTemplate ? true : 0;
  return body;
}

// Appends the text, reasoning and log probabilities in a choice of an event to the answer.
function extend(answer, choice) {
  answer.text += (hasTemplate ? choice.delta.content : choice.text) ?? "";
  answer.reasoning += choice.delta?.reasoning_content ?? "";
  const logprobs = choice.logprobs;
  if (logprobs?.content) answer.tokens.push(...logprobs.content);
  else logprobs?.tokens?.forEach((token, i) => answer.tokens.push({ token, logprob: logprobs.token_logprobs[i] }));
}

// Streams the answer to `messages` or, without a chat template, the continuation of the last message.
async function answer() {
  const conversation = messages; // clear() replaces `messages` if the user starts a new chat during the answer
  running = new AbortController();
  $("send").textContent = "Stop";
  const div = addMessage("assistant", ""), parts = { text: "", reasoning: "", tokens: [] };
  div.setAttribute("aria-busy", "true");
  let first = null, finish = null, frame = 0;
  // A long answer takes a while to render: once for all events of a frame.
  const show = () => { frame = 0; keepEnd(() => render(div, parts)); };
  $("state").textContent = "…";
  try {
    const response = await call(hasTemplate ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()), signal: running.signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.choices[0]) {
        extend(parts, event.choices[0]);
        if (parts.text || parts.reasoning) first ??= performance.now();
        finish = event.choices[0].finish_reason;
        frame ||= requestAnimationFrame(show);
      }
      if (event.usage) {
        const count = event.usage.completion_tokens, seconds = (performance.now() - first) / 1000;
        const rate = Math.max(count - 1, 0) / Math.max(seconds, 1e-3), end = finish === "length" ? ", cut off" : "";
        $("state").textContent = `${count} tokens, ${rate.toFixed(1)} tokens/s${end}`;
      }
    }
  } catch (error) {
    if (conversation === messages) {
      $("state").textContent = error.name === "AbortError" ? "stopped" : "";
      if (error.name !== "AbortError") addMessage("error", error.message);
    }
  }
  cancelAnimationFrame(frame);
  show();
  running = null;
  $("send").textContent = "Send";
  if (conversation !== messages) return;
  div.removeAttribute("aria-busy");
  if (parts.text || parts.reasoning) {
    messages.push({ role: "assistant", content: parts.text });
    const index = messages.length - 2; // of the user's message
    const actions = { Regenerate: () => restart(div, index) };
    // Browsers have the clipboard only on pages of this machine or with TLS.
    if (navigator.clipboard) actions.Copy = () => navigator.clipboard.writeText(parts.text);
    keepEnd(() => addActions(div, actions));
  } else { // no answer: the message goes back to where it was typed, so that the page shows the conversation
    const asked = div.previousElementSibling, { content } = messages.pop();
    asked.remove();
    div.remove();
    $("text").value ||= content;
  }
}

// Removes an element and those after it, and the messages after the first `count`.
function cut(div, count) {
  while (div.nextSibling) div.nextSibling.remove();
  div.remove();
  messages.length = count;
}

// Answers the user's message at `index` again; `div` is the element of the answer.
function restart(div, index) {
  if (running) return;
  cut(div, index + 1);
  answer();
}

function send(text) {
  messages.push({ role: "user", content: text });
  const index = messages.length - 1, div = addMessage("user", text);
  addActions(div, { Edit: () => {
    if (running) return;
    cut(div, index);
    $("text").value = text;
    $("text").focus();
  } });
  answer();
}

function clear() {
  running?.abort();
  messages = [];
  $("chat").replaceChildren();
  $("state").textContent = "";
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (running) return running.abort();
  const text = hasTemplate ? $("text").value.trim() : $("text").value;
  if (!text.trim() || !model) return;
  $("text").value = "";
  send(text);
});
$("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) $("form").requestSubmit();
});
document.addEventListener("keydown", event => { if (event.key === "Escape") running?.abort(); });
$("clear").addEventListener("click", clear);
