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

/** Nothing is wider than the page, and no text leaves a box or is cut by it, unless the box can be scrolled. */
export async function assertFits(page, what) {
  const found = await page.evaluate(() => {
    const wrong = new Set();
    const name = (element) => `${element.tagName}.${element.className}`;
    const root = document.documentElement;
    if (root.scrollWidth > root.clientWidth) wrong.add("the page scrolls sideways");
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode;
      if (text.data.trim() === "" || text.parentElement.closest(".sr, .skip, select")) continue;
      const range = document.createRange();
      range.selectNodeContents(text);
      const lines = [...range.getClientRects()].filter((line) => line.width > 0);
      for (let box = text.parentElement; box && lines.length > 0; box = box.parentElement) {
        const { overflowX, overflowY, display } = getComputedStyle(box);
        if (/auto|scroll/.test(overflowX + overflowY)) break; // it is scrolled
        const { left, right, top, bottom } = box.getBoundingClientRect();
        const isOut = (line) => display !== "inline" && (line.left < left - 1 || line.right > right + 1);
        const isCut = (line) => overflowY !== "visible" && (line.top < top - 1 || line.bottom > bottom + 1);
        if (lines.some((line) => isOut(line) || isCut(line))) {
          wrong.add(`${JSON.stringify(text.data.slice(0, 30))} leaves ${name(box)}`);
          break;
        }
      }
    }
    return [...wrong].slice(0, 8);
  });
  assert.deepEqual(found, [], what);
}

export async function assertAccessible(page, what) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const listed = violations.map((one) => `${one.id}: ${one.nodes.map((node) => node.target).join(", ")}`);
  assert.deepEqual(listed, [], what);
}
