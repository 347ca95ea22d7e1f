// The page of `hapax demo --page`: a real run, with its buttons. Screenshots of every view are in target/page/demo-*.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { launch, assertAccessible, assertFits, close, open, shots } from "./browser.mjs";
import { binary } from "./server.mjs";

const dir = mkdtempSync(join(tmpdir(), "hapax-demo-page-"));
const lines = [];
let demo, url, browser, ended;

before(async () => {
  mkdirSync(shots, { recursive: true });
  browser = await launch();
  demo = spawn(binary, ["demo", "--page", "--json", "--events", "2000", "--seed", "7", "--data", join(dir, "shop")], { stdio: ["ignore", "pipe", "inherit"] });
  ended = new Promise((resolve) => demo.once("exit", resolve));
  await new Promise((resolve, reject) => {
    demo.once("exit", () => reject(new Error("the demo ended")));
    createInterface({ input: demo.stdout }).on("line", (line) => {
      lines.push(JSON.parse(line));
      resolve();
    });
  });
  url = lines[0].page.replace(/\/$/, "");
});
after(async () => {
  await browser?.close();
  if (demo.exitCode === null) demo.kill("SIGKILL");
  await ended;
  rmSync(dir, { recursive: true, force: true });
});

test("the buttons kill, freeze, cut off and repeat, and say so", async () => {
  const page = await open(browser, `${url}/`);
  await page.locator(".charts canvas").first().waitFor();
  for (const [name, said] of [["Kill a worker", /killed worker \d+/], ["Storm of duplicates", /copies of recent events/], ["Cut the database", /nobody can write/], ["Freeze a worker", /froze worker \d+/]]) {
    // What the story needs just now is refused, with a sentence.
    for (;;) {
      await page.getByRole("button", { name }).click();
      await page.getByRole("button", { name, disabled: false }).waitFor();
      if (said.test(await page.locator(".demo .notice").innerText())) break;
    }
  }
  await page.locator(".news", { hasText: "page: froze worker" }).waitFor();
  await assertFits(page, "the buttons");
  await assertAccessible(page, "the buttons");
  page.wrong = page.wrong.filter((said) => !said.includes("409")); // the browser's own lines
  await close(page);
});

test("every view, in light and dark, on a desk and on a phone", async () => {
  // Until the story is over, so that everything has happened.
  const first = await open(browser, `${url}/`);
  await first.locator(".news", { hasText: "the story is over" }).waitFor({ timeout: 240_000 });
  await close(first);
  const views = { overview: ["/", ".charts canvas"], event: ["/event?id=order-17-paid", ".timeline"], dead: ["/dead", ".group"], aggregates: ["/aggregates", ".group, .empty"], retention: ["/retention", ".cards"], doctor: ["/doctor", ".findings li"] };
  for (const colorScheme of ["light", "dark"]) {
    for (const [device, viewport] of [["desk", { width: 1280, height: 900 }], ["phone", { width: 390, height: 844 }]]) {
      for (const [name, [path, ready]] of Object.entries(views)) {
        const page = await open(browser, url + path, { colorScheme, viewport });
        await page.locator(ready).first().waitFor();
        if (name === "overview") await page.getByText(/Rates are of the last (1[0-9]|20) seconds/).waitFor();
        await assertFits(page, name);
        await assertAccessible(page, `${name} ${colorScheme} ${device}`);
        await page.screenshot({ path: join(shots, `demo-${name}-${colorScheme}-${device}.png`), fullPage: true });
        await close(page);
      }
    }
  }
});

test("dead letters are redriven while it runs, and the witness still judges", async () => {
  const page = await open(browser, `${url}/dead`);
  const group = page.locator(".group", { hasText: "the label printer has no paper" });
  await group.getByRole("button", { name: "Preview a redrive" }).click();
  await group.getByText("3 of 3 would run again").waitFor();
  await group.getByLabel("Reason, for the audit").fill("there is paper");
  await group.getByRole("button", { name: "Redrive 3" }).click();
  await page.locator(".work").getByText("Redriven: 3 of 3").waitFor();
  await page.locator(".work").getByRole("button", { name: "Close" }).click();
  await page.getByText("There is no dead letter.").waitFor();
  await close(page);
  const event = await open(browser, `${url}/event?id=gift-1-shipped`);
  await event.locator(".timeline", { hasText: "done" }).waitFor();
  await close(event);
  demo.kill("SIGINT");
  assert.equal(await ended, 0);
  const last = lines.at(-1);
  assert.deepEqual([last.lost, last.doubled, last.outdated], [0, 0, 0], JSON.stringify(last));
  assert.ok(last.events > 2000 && last.effects === last.events, JSON.stringify(last));
});
