// The page in a browser, under the policy that the server sends. Screenshots are in target/page/.
import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { chromium } from "playwright-core";
import { HOSTILE, Server, fill } from "./server.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const shots = join(process.env.CARGO_TARGET_DIR ?? join(here, "../../target"), "page");
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"];
const WAIT = 60_000;
const VIEWS = { overview: "/", event: "/event?id=order-1-paid", aggregate: "/event?aggregate=order-1", search: "/event", dead: "/dead", aggregates: "/aggregates", retention: "/retention", doctor: "/doctor" };
/** What is there once a view has its data. */
const READY = { overview: ".pipeline", event: ".timeline", aggregate: ".timeline", search: ".empty", dead: ".group", aggregates: ".group", retention: ".cards", doctor: ".findings li" };

let server, browser;
before(async () => {
  mkdirSync(shots, { recursive: true });
  server = new Server();
  server.run("modules", "create", "orders");
  await server.start();
  await fill(server);
  browser = await chromium.launch({ executablePath: process.env.HAPAX_TEST_CHROMIUM ?? "/usr/bin/chromium", args: FLAGS });
});
after(async () => {
  await browser?.close();
  await server?.remove();
});

/** A page that notes whatever goes wrong in it. */
async function open(path, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, timezoneId: "Europe/Berlin", ...options });
  context.setDefaultTimeout(WAIT);
  const page = await context.newPage();
  page.wrong = [];
  page.on("console", (said) => said.type() === "error" && page.wrong.push(said.text()));
  page.on("pageerror", (error) => page.wrong.push(String(error)));
  page.on("dialog", (dialog) => { page.wrong.push(`dialog ${dialog.message()}`); dialog.dismiss(); });
  await page.goto((options.base ?? server.url) + path);
  return page;
}

async function close(page) {
  assert.deepEqual(page.wrong, []);
  await page.context().close();
}

/** Nothing is wider than the page, and no name leaves its box. */
async function assertFits(page, what) {
  const wide = await page.evaluate(() => {
    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= width) return [];
    const all = [...document.querySelectorAll("body *")].filter((element) => element.getBoundingClientRect().right > width + 1);
    return all.map((element) => `${element.tagName}.${element.className}`).slice(0, 5).concat("the page scrolls sideways");
  });
  assert.deepEqual(wide, [], what);
}

async function assertAccessible(page, what) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const told = violations.map((one) => `${one.id}: ${one.nodes.map((node) => node.target).join(", ")}`);
  assert.deepEqual(told, [], what);
}

test("the files are small, known again by their tag, and bound by a strict policy", async () => {
  let bytes = 0;
  for (const path of ["/", "/page.js", "/page.css"]) {
    const answer = await server.ask("GET", path);
    assert.equal(answer.status, 200);
    bytes += gzipSync(answer.text).length;
    const policy = answer.headers.get("content-security-policy");
    assert.match(policy, /default-src 'none'/);
    assert.match(policy, /frame-ancestors 'none'/);
    assert.doesNotMatch(policy, /unsafe|https?:|\*/);
    assert.equal(answer.headers.get("x-content-type-options"), "nosniff");
    assert.equal(answer.headers.get("referrer-policy"), "no-referrer");
    const again = await server.ask("GET", path, undefined, { "if-none-match": answer.headers.get("etag") });
    assert.deepEqual([again.status, again.text], [304, ""]);
  }
  assert.ok(bytes <= 80_000, `${bytes} bytes compressed`);
});

for (const colorScheme of ["light", "dark"]) {
  for (const [device, viewport] of [["desk", { width: 1280, height: 900 }], ["phone", { width: 390, height: 844 }]]) {
    for (const [name, path] of Object.entries(VIEWS)) {
      test(`${name}, ${colorScheme}, ${device}: fits, is accessible, breaks no policy`, async () => {
        const page = await open(path, { colorScheme, viewport });
        await page.locator(READY[name]).first().waitFor();
        await page.getByText(/Data as of \d\d:\d\d:\d\d/).first().waitFor();
        if (name === "overview") await page.getByText(/Rates are of the last/).waitFor();
        await assertFits(page, name);
        await assertAccessible(page, name);
        await page.screenshot({ path: join(shots, `${name}-${colorScheme}-${device}.png`), fullPage: true });
        await close(page);
      });
    }
  }
}

test("hostile text is text, in every view that shows it", async () => {
  for (const viewport of [{ width: 1280, height: 900 }, { width: 390, height: 844 }]) {
    const paths = ["/dead", "/aggregates", "/"];
    for (const text of Object.values(HOSTILE)) {
      paths.push(`/event?${new URLSearchParams({ id: text })}`, `/event?${new URLSearchParams({ aggregate: text })}`);
    }
    for (const path of paths) {
      const page = await open(path, { viewport });
      await page.locator(path === "/" ? ".pipeline" : path.startsWith("/event") ? ".timeline" : ".group").first().waitFor();
      assert.equal(await page.evaluate(() => window.pwned), undefined, path);
      assert.equal(await page.locator("img, main script").count(), 0, path);
      const text = await page.locator("body").innerText();
      assert.doesNotMatch(text, /[\u202a-\u202e\u2066-\u2069\u200f\u0007]/, path);
      await assertFits(page, path);
      await close(page);
    }
  }
  const page = await open(`/event?${new URLSearchParams({ id: HOSTILE.direction })}`);
  await page.locator("h2 .name", { hasText: "invoice\\u{202e}gpj.exe" }).waitFor();
  await page.screenshot({ path: join(shots, "hostile-event.png"), fullPage: true });
  await close(page);
});

test("the commands that the views show are commands, also with hostile names", async () => {
  let ran = 0;
  for (const name of ["event", "aggregate", "search", "aggregates", "retention", "doctor"]) {
    const page = await open(VIEWS[name]);
    await page.locator(READY[name]).first().waitFor();
    for (const line of await page.locator(".command code").allInnerTexts()) {
      const does = line.includes(" parked resume ") ? `${line} --dry-run` : line;
      const { status, stdout, stderr } = server.shell(does);
      assert.equal(status, 0, `${does}: ${stderr}`);
      if (does !== line) assert.match(stdout, /would redrive/, does);
      ran += 1;
    }
    await close(page);
  }
  assert.ok(ran >= 12, `${ran} were run`);
});

test("what nobody knows is said, and the form stays", async () => {
  const page = await open("/event?id=nobody-knows-it");
  await page.getByRole("alert").filter({ hasText: "nobody-knows-it" }).waitFor();
  assert.equal(await page.getByRole("searchbox").inputValue(), "nobody-knows-it");
  page.wrong = page.wrong.filter((said) => !said.includes("404")); // the browser's own line
  await close(page);
});

test("an event is found by keyboard alone", async () => {
  const page = await open("/");
  await page.locator(".pipeline").waitFor();
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to the content");
  await page.keyboard.press("Tab");
  await page.keyboard.press("Tab");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Event");
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Event", exact: true }).waitFor();
  assert.equal(new URL(page.url()).pathname, "/event");
  await page.keyboard.press("Tab");
  await page.keyboard.press("Tab");
  await page.keyboard.type("order-1-paid");
  await page.keyboard.press("Enter");
  await page.locator(".step.ledger").first().waitFor();
  assert.match(await page.locator(".timeline").innerText(), /dead after 1 attempt/);
  assert.match(await page.locator(".command code").innerText(), /hapax --data \S+ explain order-1-paid$/);
  await page.goBack();
  await page.locator(".empty").waitFor();
  await close(page);
});

test("a redrive is previewed, does what it showed, and leaves audit rows", async () => {
  const page = await open("/dead");
  const group = page.locator(".group", { hasText: "card of # was declined" }).filter({ hasNotText: "acme" });
  await group.getByRole("button", { name: "Preview a redrive" }).click();
  await group.getByText("2 of 2 would run again").waitFor();
  await assertAccessible(page, "the preview");
  await page.screenshot({ path: join(shots, "redrive-preview.png"), fullPage: true });
  // One is changed by somebody else, and one more dies: both are outside what was shown.
  const changed = { scope: "mailer", ids: ["order-1-paid"], reason: "by another" };
  const entry = async (id) => (await server.must("GET", `/v1/dead?id=${id}`)).entries[0];
  const { token } = await entry("order-1-paid");
  await server.must("POST", "/v1/dead/redrive", changed);
  await server.append("order-9", [{ id: "order-9-paid", payload: { fail: "card of customer-1009 was declined: HTTP 402" } }]);
  await server.consume("mailer", async () => {
    const again = await entry("order-1-paid");
    return again && again.token !== token && (await entry("order-9-paid"));
  });
  await group.getByLabel("Reason, for the audit").fill("the bank is back");
  assert.match(await group.locator("code").innerText(), /dead redrive --scope mailer --reason 'the bank is back' order-1-paid order-3-paid$/);
  await group.getByRole("button", { name: "Redrive 2" }).click();
  await group.getByText("Redriven: 1 of 2, 1 stayed as they were").waitFor();
  await group.getByText(/order-1-paid: .*has changed since/).waitFor();
  await page.screenshot({ path: join(shots, "redrive-done.png"), fullPage: true });
  const dead = (await server.must("GET", "/v1/dead")).entries.map((entry) => entry.id);
  assert.ok(dead.includes("order-1-paid") && dead.includes("order-9-paid") && !dead.includes("order-3-paid"), dead.join());
  const audit = await server.ask("GET", "/v1/audit");
  assert.match(audit.text, /the bank is back/);
  await page.screenshot({ path: join(shots, "redrive-done.png"), fullPage: true });
  await group.getByRole("button", { name: "Close" }).click();
  await page.getByRole("link", { name: "order-9-paid" }).waitFor();
  await close(page);
});

test("what became of a redrive stays, also when nothing of the group is left", async () => {
  const page = await open("/dead");
  const group = page.locator(".group", { hasText: "acme" });
  await group.getByRole("button", { name: "Preview a redrive" }).click();
  await group.getByLabel("Reason, for the audit").fill("mended");
  await group.getByRole("button", { name: "Redrive 1" }).click();
  await group.getByText("Redriven: 1 of 1").waitFor();
  // The list was read again, by itself.
  await page.waitForResponse((answer) => answer.url().includes("/v1/dead/groups"));
  await group.getByText("The audit has a row for each").waitFor();
  await group.getByRole("button", { name: "Close" }).click();
  await group.waitFor({ state: "detached" });
  await close(page);
});

test("an empty server teaches what would fill it", async () => {
  const fresh = new Server();
  await fresh.start();
  try {
    for (const [name, path] of [["overview", "/"], ["dead", "/dead"], ["aggregates", "/aggregates"]]) {
      const page = await open(path, { base: fresh.url });
      await page.locator(".empty code").first().waitFor();
      await assertAccessible(page, name);
      await page.screenshot({ path: join(shots, `empty-${name}.png`), fullPage: true });
      await close(page);
    }
  } finally {
    await fresh.remove();
  }
});

test("a server that is lost is said so, and found again", async () => {
  const other = new Server();
  await other.start();
  try {
    const page = await open("/", { base: other.url });
    await page.locator(".state", { hasText: "Live" }).waitFor();
    await other.stop("SIGKILL");
    await page.getByRole("alert").filter({ hasText: "The server does not answer" }).waitFor();
    await page.locator(".state", { hasText: "Lost" }).waitFor();
    await page.screenshot({ path: join(shots, "lost.png") });
    await other.start(other.address);
    await page.locator(".state", { hasText: "Live" }).waitFor();
    assert.equal(await page.getByRole("alert").count(), 0);
    page.wrong = page.wrong.filter((said) => !said.includes("ERR_")); // the browser's own lines
    await close(page);
  } finally {
    await other.remove();
  }
});

test("with tokens the page logs in, by a cookie that no script and no other site can use", async () => {
  const closed = new Server();
  const admin = closed.run("token", "create", "--name", "ops", "--role", "admin", "--by", "test");
  const acme = closed.run("token", "create", "--name", "acme-ops", "--role", "admin", "--tenant", "acme", "--by", "test");
  const reader = closed.run("token", "create", "--name", "reader", "--role", "read", "--by", "test");
  await closed.start();
  try {
    const page = await open("/dead", { base: closed.url });
    const login = async (token) => {
      await page.getByLabel("Token with the role admin").fill(token);
      await page.keyboard.press("Enter");
    };
    await page.getByRole("heading", { name: "Log in" }).waitFor();
    await assertAccessible(page, "login");
    await page.screenshot({ path: join(shots, "login.png") });
    await login("hpx_wrong");
    await page.getByRole("alert").waitFor();
    await login(admin);
    await page.getByRole("heading", { name: "Dead letters" }).waitFor();
    await page.locator(".state", { hasText: "Live" }).waitFor();
    const [cookie] = await page.context().cookies();
    assert.deepEqual([cookie.httpOnly, cookie.sameSite], [true, "Strict"]);
    assert.equal(await page.evaluate(() => document.cookie), "");
    // The cookie alone reads; it changes something only from this server's own page.
    const cookies = { cookie: `${cookie.name}=${cookie.value}` };
    const body = { scope: "mailer", ids: ["a"], reason: "r" };
    assert.equal((await closed.ask("GET", "/v1/session", undefined, cookies)).status, 200);
    for (const origin of [{}, { origin: "http://127.0.0.1:1" }, { origin: "null" }]) {
      const answer = await closed.ask("POST", "/v1/dead/redrive", body, { ...cookies, ...origin });
      assert.deepEqual([answer.status, answer.json.code], [403, "origin-forbidden"], JSON.stringify(origin));
    }
    assert.equal((await closed.ask("POST", "/v1/dead/redrive", body, { ...cookies, origin: closed.url })).status, 404);
    await page.getByRole("button", { name: "Log out" }).click();
    await page.getByRole("heading", { name: "Log in" }).waitFor();
    assert.deepEqual(await page.context().cookies(), []);
    // An operator of one tenant sees no view that is about all of them.
    await login(acme);
    await page.getByRole("link", { name: "Aggregates" }).waitFor();
    assert.equal(await page.getByRole("link", { name: "Doctor" }).count(), 0);
    await page.goto(`${closed.url}/doctor`);
    await page.getByText("needs a token without a tenant").waitFor();
    await page.goto(`${closed.url}/`);
    await page.locator(".pipeline").waitFor();
    await assertFits(page, "the overview of a tenant");
    await page.screenshot({ path: join(shots, "overview-tenant.png"), fullPage: true });
    await page.getByRole("button", { name: "Log out" }).click();
    await login(reader);
    await page.getByText("needs a token with the role admin").waitFor();
    page.wrong = page.wrong.filter((said) => !/40[13]/.test(said)); // the browser's own lines
    await close(page);
  } finally {
    await closed.remove();
  }
});
