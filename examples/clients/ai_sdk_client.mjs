// Vercel's AI SDK: answers, streams, penalties, log probabilities, tools and schemas.
// npm install ai @ai-sdk/openai @ai-sdk/openai-compatible zod
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const server = createOpenAICompatible({ name: "local", baseURL, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL, apiKey: "none" });
const City = z.object({ name: z.string().max(20), hasHarbour: z.boolean() });
const getWeather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(20) }),
});

for (const [api, model] of [
  ["chat completions", server.chatModel(name)],
  ["responses", openai.responses(name)],
]) {
  const options = { model, prompt: "Describe Oslo.", maxOutputTokens: 80, temperature: 0, maxRetries: 0 };
  const answer = await generateText(options);
  console.log(`${api}: answer:`, answer.text, answer.usage.totalTokens);
  let text = "";
  for await (const piece of streamText(options).textStream) {
    text += piece;
  }
  assert.equal(text, answer.text);

  const city = await generateText({ ...options, output: Output.object({ schema: City }) });
  console.log("structured:", City.parse(city.output));

  const calling = { ...options, tools: { getWeather }, toolChoice: "required" };
  const { toolCalls, response } = await generateText(calling);
  console.log("call:", toolCalls[0].toolName, toolCalls[0].input);
  const calls = await streamText(calling).toolCalls;
  assert.deepEqual(calls[0].input, toolCalls[0].input);
  const output = { type: "text", value: "Rain" };
  const content = toolCalls.map(({ toolCallId, toolName }) => ({ type: "tool-result", toolCallId, toolName, output }));
  const messages = [
    { role: "user", content: options.prompt },
    ...response.messages,
    { role: "tool", content },
  ];
  const { prompt, ...rest } = options;
  console.log("after the call:", (await generateText({ ...rest, messages, tools: { getWeather } })).text);
}

const scored = await generateText({
  model: openai.chat(name),
  prompt: "Hello",
  maxOutputTokens: 20,
  frequencyPenalty: 0.5,
  presencePenalty: 0.5,
  providerOptions: { openai: { logprobs: 2 } },
});
console.log("log probabilities:", scored.providerMetadata.openai.logprobs[0].top_logprobs);
