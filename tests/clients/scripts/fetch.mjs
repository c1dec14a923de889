// An agent of Node's own fetch: one call, whose connection stays open, after the other; streams.
const tools = [{ type: "function", function: { name: "look", parameters: { type: "object" } } }];
const messages = [{ role: "user", content: "Look at both." }];
for (let turn = 0; turn < 3; turn++) {
  const response = await fetch("https://api.openai.com/v1/chat/completions", {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" },
    body: JSON.stringify({ model: "gpt-5", messages, tools, stream: turn === 1 }),
  });
  console.log(await response.text());
  messages.push({ role: "tool", tool_call_id: `call_done_${turn + 1}`, content: "there" });
}
