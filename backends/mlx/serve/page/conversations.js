"use strict";
// The conversations that the browser keeps: objects with an id, a title, the model, the system prompt and the messages.

const STORE = "executorch-mlx.conversations", TITLE_LENGTH = 60;

const conversations = {
  load() {
    try {
      const stored = JSON.parse(localStorage.getItem(STORE) ?? "[]");
      return Array.isArray(stored) ? stored.filter(isConversation) : [];
    } catch { return []; }
  },

  // Stores conversations, the latest first. If they need more room than the browser gives, the oldest ones go.
  store(all) {
    for (let rest = all; ; rest = rest.slice(0, -1)) {
      try {
        return localStorage.setItem(STORE, JSON.stringify(rest));
      } catch (error) {
        if (rest.length === 0) return;
      }
    }
  },

  get: id => conversations.load().find(entry => entry.id === id),

  put(entry) {
    conversations.store([entry, ...conversations.load().filter(other => other.id !== entry.id)]);
  },

  remove(id) {
    conversations.store(conversations.load().filter(entry => entry.id !== id));
  },

  // Adds the conversations of an exported file, in place of those with the same ids. Throws an error for other files.
  add(text) {
    let added = null;
    try { added = JSON.parse(text); } catch { /* see below */ }
    if (!Array.isArray(added) || !added.every(isConversation)) throw new Error("the file has no chats of this page");
    const ids = new Set(added.map(entry => entry.id));
    conversations.store([...added, ...conversations.load().filter(entry => !ids.has(entry.id))]);
  },
};

function isConversation(value) {
  const isMessage = entry => typeof entry?.role === "string" && typeof entry.content === "string";
  return typeof value?.id === "string" && Array.isArray(value.messages) && value.messages.every(isMessage);
}

const titleOf = messages => messages.find(entry => entry.role === "user")?.content.trim().slice(0, TITLE_LENGTH) ?? "";

// A new id. Browsers have crypto.randomUUID() only on pages of this machine or with TLS.
const newId = () => [...crypto.getRandomValues(new Uint32Array(4))].map(part => part.toString(36)).join("");
