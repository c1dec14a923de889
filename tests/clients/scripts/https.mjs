// An agent of Node's own https module; its requests have no Content-Length (chunked).
import https from "node:https";

const tools = [{ type: "function", function: { name: "look", parameters: { type: "object" } } }];
const messages = [{ role: "user", content: "Look at both." }];
for (let turn = 0; turn < 3; turn++) {
  const text = await new Promise((resolve, reject) => {
    const headers = { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" };
    const asked = https.request("https://api.openai.com/v1/chat/completions", { method: "POST", headers }, (answer) => {
      let said = "";
      answer.on("data", (piece) => (said += piece));
      answer.on("end", () => resolve(said));
    });
    asked.on("error", reject);
    asked.write(JSON.stringify({ model: "gpt-5", messages, tools }));
    asked.end();
  });
  console.log(text);
  messages.push({ role: "tool", tool_call_id: `call_done_${turn + 1}`, content: "there" });
}
