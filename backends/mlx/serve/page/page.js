"use strict";
const $ = id => document.getElementById(id);
let messages = [], model = null, running = null; // running: the AbortController of the current request
let conversation = newId(), contextLength = 0; // the id of the conversation, and the model's context in tokens
let pictures = [], takesPictures = false; // data URLs for the next message; whether the model takes them
let hasTemplate = true; // whether the model has a chat template; otherwise each message is the prompt of a completion
let key = sessionStorage.getItem("key");

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
  ({ id: model, has_chat_template: hasTemplate, context_length: contextLength } = entry);
  $("model").textContent = document.title = model;
  $("notice").hidden = hasTemplate;
  takesPictures = entry.capabilities?.images === true;
  $("attach").hidden = !takesPictures;
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
  listConversations();
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

// A message as the API takes it: with a part for each picture.
function asRequest({ images, ...message }) {
  if (!images?.length) return message;
  const parts = images.map(url => ({ type: "image_url", image_url: { url } }));
  return { ...message, content: [...parts, { type: "text", text: message.content }] };
}

function requestBody() {
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  const prompt = hasTemplate ? { messages: [...system, ...messages.map(asRequest)] } : { prompt: messages.at(-1).content };
  const body = { model, ...prompt, stream: true, stream_options: { include_usage: true } };
  for (const input of document.querySelectorAll("#settings input[type=number]"))
    if (input.value) body[input.id.replaceAll("-", "_")] = Number(input.value);
  if ($("stop").value) body.stop = [$("stop").value];
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
  const own = messages; // clear() replaces `messages` if the user starts a new chat during the answer
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
        showContext((event.usage.prompt_tokens ?? 0) + count);
      }
    }
  } catch (error) {
    if (own === messages) {
      $("state").textContent = error.name === "AbortError" ? "stopped" : "";
      if (error.name !== "AbortError") addMessage("error", error.message);
    }
  }
  cancelAnimationFrame(frame);
  show();
  running = null;
  $("send").textContent = "Send";
  if (own !== messages) return;
  div.removeAttribute("aria-busy");
  if (parts.text || parts.reasoning) {
    messages.push({ role: "assistant", content: parts.text });
    if (parts.reasoning) messages.at(-1).reasoning_content = parts.reasoning;
    keepEnd(() => addAnswerActions(div, messages.length - 2));
    keep();
  } else { // no answer: the message goes back to where it was written
    const { content, images } = messages.pop();
    $("text").value ||= content;
    if (!pictures.length) setPictures(images ?? []);
    div.previousSibling?.remove();
    div.remove();
  }
}

// `index` is that of the user's message.
function addAnswerActions(div, index) {
  const { content } = messages[index + 1];
  addActions(div, { Regenerate: () => restart(div, index) });
  addCopyButton(div.querySelector(".actions"), () => content);
}

function showContext(used) {
  $("context-label").hidden = !contextLength || !used;
  $("context").max = contextLength;
  $("context").high = 0.8 * contextLength;
  $("context").value = used;
  $("used").textContent = `${used} of ${contextLength} tokens`;
}

// Conversations ----------------------------------------------------------------------------

// Stores the conversation as it is.
function keep() {
  if (!hasTemplate) return;
  const texts = messages.map(({ images, ...message }) => message); // the browser has no room for pictures
  const entry = { id: conversation, title: titleOf(messages), model, system: $("system").value, messages: texts };
  conversations.put(entry);
  listConversations();
}

function listConversations() {
  const options = conversations.load().map(entry => new Option(entry.title || "untitled", entry.id));
  $("conversations").replaceChildren(new Option("new chat", ""), ...options);
  $("conversations").value = messages.length ? conversation : "";
}

function open(id) {
  clear();
  const entry = conversations.get(id);
  if (!entry) return listConversations();
  ({ id: conversation, messages } = entry);
  $("system").value = entry.system ?? "";
  messages.forEach((message, index) => {
    if (message.role === "user") addUserMessage(message.content, index);
    else {
      const div = addMessage("assistant", "");
      render(div, { text: message.content, reasoning: message.reasoning_content });
      addAnswerActions(div, index - 1);
    }
  });
  listConversations();
}

function download() {
  const data = new Blob([JSON.stringify(conversations.load(), null, 1)], { type: "application/json" });
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(data), download: "chats.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function importChats(text) {
  try {
    conversations.add(text);
    $("state").textContent = "";
  } catch (error) { $("state").textContent = error.message; }
  listConversations();
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

// `index` is that of the message.
function addUserMessage(text, index) {
  const div = addMessage("user", text), images = messages[index]?.images ?? [];
  div.prepend(...images.map(pictureOf));
  addActions(div, { Edit: () => {
    if (running) return;
    cut(div, index);
    $("text").value = text;
    setPictures(images);
    $("text").focus();
  } });
}

// Pictures ---------------------------------------------------------------------------------

const pictureOf = url => Object.assign(new Image(), { src: url, alt: "picture", className: "picture" });

function setPictures(urls) {
  pictures = urls;
  $("pictures").replaceChildren(...urls.map((url, index) => {
    const button = Object.assign(document.createElement("button"), { type: "button", title: "Remove", ariaLabel: "Remove the picture" });
    button.append(pictureOf(url));
    button.addEventListener("click", () => setPictures(pictures.filter((_, other) => other !== index)));
    return button;
  }));
}

const dataUrl = file => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

// Adds the pictures among the files to the next message. Returns whether there are any.
function addPictures(files) {
  const found = takesPictures ? [...files].filter(file => file.type.startsWith("image/")) : [];
  Promise.all(found.map(dataUrl)).then(urls => setPictures([...pictures, ...urls]))
    .catch(error => { $("state").textContent = error.message; });
  return found.length > 0;
}

$("text").addEventListener("paste", event => { if (addPictures(event.clipboardData.files)) event.preventDefault(); });
document.addEventListener("dragover", event => { if (takesPictures) event.preventDefault(); });
document.addEventListener("drop", event => {
  if (takesPictures && event.dataTransfer.files.length) event.preventDefault();
  addPictures(event.dataTransfer.files);
});
$("attach").addEventListener("click", () => $("picture-file").click());
$("picture-file").addEventListener("change", () => { addPictures($("picture-file").files); $("picture-file").value = ""; });

function send(text) {
  for (const error of document.querySelectorAll("#chat > .error")) error.remove();
  messages.push({ role: "user", content: text, ...(pictures.length ? { images: pictures } : {}) });
  setPictures([]);
  addUserMessage(text, messages.length - 1);
  answer();
}

function clear() {
  running?.abort();
  messages = [];
  setPictures([]);
  conversation = newId();
  $("chat").replaceChildren();
  $("state").textContent = "";
  showContext(0);
  listConversations();
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
$("conversations").addEventListener("change", () => open($("conversations").value));
$("delete").addEventListener("click", () => { conversations.remove(conversation); clear(); });
$("export").addEventListener("click", download);
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  if ($("file").files[0]) importChats(await $("file").files[0].text());
  $("file").value = "";
});
