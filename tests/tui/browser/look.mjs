// Opens a page in Chromium, presses a key, and prints as JSON what the page asked for and what its terminal was told.
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";

const [link, first, key, then] = process.argv.slice(2);
const browser = await puppeteer.launch({
  args: [...chromium.args, "--no-sandbox"], executablePath: await chromium.executablePath(), headless: "shell",
});
try {
  const page = await browser.newPage();
  const asked = [], errors = [];
  let told = "", wanted = null, found = null;
  const hear = text => { told += text; if (wanted !== null && told.includes(wanted)) found(); };
  const until = text => new Promise((resolve, reject) => {
    const late = setTimeout(() => reject(new Error(`the terminal was not told ${text}`)), 20000);
    [wanted, found] = [text, () => { clearTimeout(late); resolve(); }];
    hear("");
  });
  const session = await page.createCDPSession();
  await session.send("Network.enable");
  session.on("Network.requestWillBeSent", ({ request }) => asked.push(request.url));
  session.on("Network.webSocketCreated", ({ url }) => asked.push(url));
  session.on("Network.webSocketFrameReceived", ({ response }) =>
    hear(response.opcode === 2 ? Buffer.from(response.payloadData, "base64").toString() : ""));
  page.on("pageerror", error => errors.push(error.message));
  page.on("console", message => { if (message.type() === "error") errors.push(message.text()); });
  await page.goto(link);
  await until(first);
  await page.waitForSelector("body.-first-byte canvas");
  // Without a click: the page gives the terminal the keyboard by itself.
  await page.keyboard.type(key);
  await until(then);
  const drawn = await page.evaluate(() => Array.from(document.querySelectorAll("canvas.xterm-text-layer")).some(
    canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0)));
  console.log(JSON.stringify({ asked, errors, drawn, url: page.url() }));
} finally {
  await browser.close();
}
