// A browser, and what must be so on every page.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const here = dirname(fileURLToPath(import.meta.url));
export const shots = join(process.env.CARGO_TARGET_DIR ?? join(here, "../../target"), "page");
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"];
const WAIT = 60_000;

export function launch() {
  return chromium.launch({ executablePath: process.env.HAPAX_TEST_CHROMIUM ?? "/usr/bin/chromium", args: FLAGS });
}

/** A page that notes whatever goes wrong in it. */
export async function open(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, timezoneId: "Europe/Berlin", ...options });
  context.setDefaultTimeout(WAIT);
  const page = await context.newPage();
  page.wrong = [];
  page.on("console", (said) => said.type() === "error" && page.wrong.push(said.text()));
  page.on("pageerror", (error) => page.wrong.push(String(error)));
  page.on("dialog", (dialog) => { page.wrong.push(`dialog ${dialog.message()}`); dialog.dismiss(); });
  await page.goto(url);
  return page;
}

export async function close(page) {
  assert.deepEqual(page.wrong, []);
  await page.context().close();
}

/** Nothing is wider than the page, and no name leaves its box. */
export async function assertFits(page, what) {
  const wide = await page.evaluate(() => {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return [];
    const all = [...document.querySelectorAll("body *")].filter((element) => element.getBoundingClientRect().right > width + 1);
    return all.map((element) => `${element.tagName}.${element.className}`).slice(0, 5).concat("the page scrolls sideways");
  });
  assert.deepEqual(wide, [], what);
}

export async function assertAccessible(page, what) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const listed = violations.map((one) => `${one.id}: ${one.nodes.map((node) => node.target).join(", ")}`);
  assert.deepEqual(listed, [], what);
}
