"use strict";
// Shows answers: as Markdown with code and formulas, or with a shade for the probability of each token.

// What an answer may not contain. An id or a name could be that of a control of this page.
const SANITIZE = {
  FORBID_TAGS: ["img", "style", "form", "button", "select", "textarea"], FORBID_ATTR: ["id", "name", "style"] };
DOMPurify.addHook("afterSanitizeAttributes", node => { // a link in the same tab would end the chat
  if (node.nodeName.toLowerCase() === "a") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

// Formulas in LaTeX are kept from Markdown, which would take their backslashes, underscores and lines for its own.
const DISPLAYED = /\$\$[^]+?\$\$|\\\[[^]+?\\\]/.source, IN_TEXT = /\\\([^]+?\\\)|\$(?! )[^$`\n]+?(?<! )\$(?!\d)/.source;
const escaped = text => text.replace(/[&<>]/g, character => `&#${character.charCodeAt()};`);
const formulas = (level, start, pattern, toHtml) => ({
  name: `${level}-formula`, level,
  start: source => source.match(start)?.index,
  tokenizer(source) {
    const raw = pattern.exec(source)?.[0];
    if (raw) return { type: `${level}-formula`, raw };
  },
  renderer: ({ raw }) => toHtml(`<span class="formula">${escaped(raw)}</span>`),
});
marked.use({ extensions: [
  formulas("block", /\n {0,3}(\$\$|\\\[)/, new RegExp(`^ {0,3}(${DISPLAYED}) *(\\n|$)`), html => `<p>${html}</p>`),
  formulas("inline", /\$|\\[([]/, new RegExp(`^(${DISPLAYED}|${IN_TEXT})`), html => html),
] });

// Replaces the source of each formula by MathML. One that cannot be read stays as it is.
function showFormulas(body) {
  for (const element of body.querySelectorAll("span.formula")) {
    const source = element.textContent.trim(), width = source.startsWith("$") && !source.startsWith("$$") ? 1 : 2;
    try {
      const displayMode = source.startsWith("$$") || source.startsWith("\\[");
      temml.render(source.slice(width, -width), element, { displayMode, throwOnError: true });
      element.title = source;
    } catch { element.textContent = source; }
  }
}

function showCode(body) {
  for (const code of body.querySelectorAll("pre > code")) {
    const text = code.textContent, language = /language-(\S+)/.exec(code.className)?.[1];
    if (hljs.getLanguage(language ?? "")) code.innerHTML = hljs.highlight(text, { language }).value;
    addCopyButton(code.parentElement, () => text);
  }
}

// Browsers have the clipboard only on pages of this machine or with TLS.
function addCopyButton(parent, text) {
  if (!navigator.clipboard) return;
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "copy", textContent: "Copy" });
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  parent.append(button);
}

function showTokens(body, tokens) {
  body.replaceChildren(...tokens.map(({ token, logprob }) => {
    const span = document.createElement("span"), p = Math.exp(logprob);
    span.className = "token";
    span.textContent = token;
    span.title = `probability ${(100 * p).toFixed(1)} %`;
    span.style.backgroundColor = `rgb(220 38 38 / ${(0.6 * (1 - p)).toFixed(2)})`;
    return span;
  }));
}

// Shows the reasoning in a section that can be opened. It is open while there is no answer.
function showReasoning(div, answer) {
  let section = div.querySelector(".thoughts");
  if (!section) {
    section = document.createElement("details");
    section.className = "thoughts";
    section.append(document.createElement("summary"), document.createElement("div"));
    section.firstChild.textContent = "Reasoning";
    Object.assign(section.lastChild, { className: "reasoning", dir: "auto" });
    section.open = true;
    div.prepend(section);
  }
  if (answer.text && !section.dataset.closed) {
    section.open = false;
    section.dataset.closed = "yes"; // once: after that, it is up to the user
  }
  section.lastChild.textContent = answer.reasoning;
}

// Renders an answer into its element.
function render(div, answer) {
  const body = div.querySelector(".body");
  if (answer.tokens?.length) {
    showTokens(body, answer.tokens);
    div.classList.add("plain");
  } else if (hasTemplate) {
    body.innerHTML = DOMPurify.sanitize(marked.parse(answer.text), SANITIZE);
    showFormulas(body);
    showCode(body);
  } else body.textContent = answer.text;
  if (answer.reasoning) showReasoning(div, answer);
}
