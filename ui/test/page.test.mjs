// The page in a browser, under the policy that the server sends. Screenshots are in target/page/.
import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { gzipSync } from "node:zlib";
import { assertAccessible, assertFits, close, launch, open as visit, shots } from "./browser.mjs";
import { HOSTILE, Server, fill, tenantOf } from "./server.mjs";

const VIEWS = { overview: "/", event: "/event?id=order-1-paid", aggregate: "/event?aggregate=order-1", key: "/event?key=order-0", search: "/event", dead: "/dead", aggregates: "/aggregates", retention: "/retention", doctor: "/doctor" };
/** What is there once a view has its data. */
const READY = { overview: ".pipeline", event: ".timeline", aggregate: ".timeline", key: ".timeline", search: ".empty", dead: ".group", aggregates: ".group", retention: ".cards", doctor: ".findings li" };

let server, browser;
before(async () => {
  mkdirSync(shots, { recursive: true });
  server = new Server();
  server.run("modules", "create", "orders");
  await server.start();
  await fill(server);
  browser = await launch();
});
after(async () => {
  await browser?.close();
  await server?.remove();
});

/** A view of the server, or of another one. */
function open(path, { base, ...options } = {}) {
  return visit(browser, (base ?? server.url) + path, options);
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
        if (name !== "search") await page.getByText(/Data as of \d\d:\d\d:\d\d UTC/).first().waitFor();
        assert.ok((await page.getByText(/Data as of/).count()) <= 1, "one time, of the data that are shown");
        if (name === "overview") await page.getByText(/Rates are of the last/).waitFor();
        await assertFits(page, name);
        await assertAccessible(page, name);
        await page.screenshot({ path: join(shots, `${name}-${colorScheme}-${device}.png`), fullPage: true });
        await close(page);
      });
    }
  }
}

test("T534: hostile text is text, in every view that shows it", async () => {
  for (const viewport of [{ width: 1280, height: 900 }, { width: 390, height: 844 }]) {
    const paths = ["/dead", "/aggregates", "/"];
    for (const [name, text] of Object.entries(HOSTILE)) {
      paths.push(`/event?${new URLSearchParams({ id: `tenant-${name}-paid`, tenant: tenantOf(text) })}`);
      paths.push(`/event?${new URLSearchParams({ id: `scope-${name}-paid` })}`);
      paths.push(`/event?${new URLSearchParams({ id: text })}`, `/event?${new URLSearchParams({ aggregate: text })}`);
    }
    for (const path of paths) {
      const page = await open(path, { viewport });
      await page.locator(path === "/" ? ".pipeline" : path.startsWith("/event") ? ".timeline" : ".group").first().waitFor();
      assert.equal(await page.evaluate(() => window.pwned), undefined, path);
      assert.equal(await page.locator("img, main script").count(), 0, path);
      for (const name of path === "/dead" ? [...Object.keys(HOSTILE), "tenant"] : []) {
        // The preview names scope, tenant and reason once more, and so does the command.
        const group = page.locator(".group", { has: page.getByRole("link", { name: name === "tenant" ? "tenant-long-paid" : `scope-${name}-paid`, exact: true }) });
        await group.getByRole("button", { name: "Preview a drop" }).click();
        await group.getByText("1 of 1 would be given up").waitFor();
        await assertFits(page, `the preview of ${name}`);
      }
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

test("T534: what leaves its box or is cut by it is found, also where the page does not scroll sideways", async () => {
  const page = await open("/dead");
  await page.locator(".group").first().waitFor();
  await assertFits(page, "as it is");
  const styles = [
    [".reason", { overflow: "hidden", whiteSpace: "nowrap", width: "4rem" }], [".reason", { overflow: "hidden", height: "1rem" }],
    [".facts dd", { whiteSpace: "nowrap", width: "1rem" }],
  ];
  for (const [selector, style] of styles) {
    const one = page.locator(selector).first();
    await one.evaluate((one, style) => Object.assign(one.style, style), style);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= document.documentElement.clientWidth));
    await assert.rejects(assertFits(page, selector), /leaves/, selector);
    await one.evaluate((one) => { one.style.cssText = ""; });
  }
  await close(page);
});

test("the commands that the views show are commands, also with hostile names", async () => {
  let ran = 0;
  for (const name of ["event", "aggregate", "key", "search", "dead", "aggregates", "retention", "doctor"]) {
    const page = await open(VIEWS[name]);
    await page.locator(READY[name]).first().waitFor();
    if (name === "dead") {
      // Each group's own command is there once it is previewed; one is open at a time.
      for (const group of await page.locator(".group").all()) {
        await group.getByRole("button", { name: "Preview a redrive" }).click();
        const line = await group.locator(".command code").innerText();
        const does = line.replace(" dead redrive ", " dead redrive --dry-run ");
        const { status, stdout, stderr } = server.shell(does);
        assert.equal(status, 0, `${does}: ${stderr}`);
        assert.match(stdout, /would redrive|runs again/, does);
        ran += 1;
      }
      await close(page);
      continue;
    }
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

test("a keyed write is followed from its key to its record", async () => {
  const page = await open("/event");
  await page.getByLabel("Search by").selectOption("key");
  await page.getByRole("searchbox").fill("order-1");
  await page.keyboard.press("Enter");
  await page.locator(".step.key", { hasText: "its answer was stored: status 201" }).waitFor();
  await page.locator(".step.journal", { hasText: "appended as seq 1" }).waitFor();
  assert.equal(new URL(page.url()).searchParams.get("key"), "order-1");
  // All layers have the same columns: a rule of something else must not make one narrow.
  const widths = await page.locator(".step .what").evaluateAll((all) => all.map((what) => Math.round(what.getBoundingClientRect().width)));
  assert.deepEqual([...new Set(widths)], [widths[0]], widths.join());
  await close(page);
});

test("idle hours are one line, and a short pause is none", async () => {
  const page = await open("/event");
  const step = (at, what) => ({ at, layer: "ledger", name: "mailer", event: "e", seq: null, what, facts: { leased_until: at } });
  const steps = [step("2026-03-04T08:00:00.000Z", "first seen"), step("2026-03-04T08:00:59.000Z", "failed"), step("2026-03-04T10:00:59.000Z", "done")];
  await page.route("**/v1/explain?*", (route) => route.fulfill({ json: { of: { event: "e" }, tenant: null, steps, scopes: [], stores: [], not_recorded: "" } }));
  await page.getByRole("searchbox").fill("e");
  await page.keyboard.press("Enter");
  await page.locator(".timeline").waitFor();
  const rows = await page.locator(".timeline > li").allInnerTexts();
  const kinds = await page.locator(".timeline > li").evaluateAll((all) => all.map((row) => row.className.split(" ")[0]));
  assert.deepEqual(kinds, ["day", "step", "step", "gap", "step"], rows.join(" | "));
  assert.equal(rows[3], "nothing for 2 h");
  // Times of steps and of what they say are of one zone, that of the browser.
  assert.equal(rows[0], "2026-03-04 UTC+01:00");
  assert.match(rows[4], /11:00:59\.000[\s\S]*2026-03-04 11:00:59 UTC\+01:00/);
  await assertFits(page, "a folded timeline");
  await close(page);
});

test("T427: a time has the offset of its own date, also within the day on which clocks change", async () => {
  const page = await open("/event");
  const step = (at) => ({ at, layer: "ledger", name: "mailer", event: "e", seq: null, what: "failed", facts: {} });
  const steps = ["2026-07-01T10:00:00.000Z", "2026-10-25T00:30:00.000Z", "2026-10-25T01:30:00.000Z"].map(step);
  await page.route("**/v1/explain?*", (route) => route.fulfill({ json: { of: { event: "e" }, tenant: null, steps, scopes: [], stores: [], not_recorded: "" } }));
  await page.getByRole("searchbox").fill("e");
  await page.keyboard.press("Enter");
  await page.locator(".timeline").waitFor();
  assert.deepEqual(await page.locator(".timeline .day").allInnerTexts(), ["2026-07-01 UTC+02:00", "2026-10-25 UTC+02:00", "2026-10-25 UTC+01:00"]);
  assert.deepEqual(await page.locator(".timeline .step .at").allInnerTexts(), ["12:00:00.000", "02:30:00.000", "02:30:00.000"]);
  await close(page);
});

test("T428: what is sent is what the last preview shows", async () => {
  const page = await open("/dead");
  const event = (id, time) => ({ what: "redrive", id, aggregate: null, seq: null, time, token: id.length + (time ? Number(time.slice(5, 7)) : 0), reason: null, changes: true, runs: true, outcome: "runs again" });
  // The answer to the first question after the preview comes last.
  let asked = 0, late;
  const held = new Promise((resolve) => { late = resolve; });
  await page.route("**/v1/dead/preview", async (route) => {
    const { out_of_order: outOfOrder } = route.request().postDataJSON();
    asked += 1;
    if (asked === 2) await held;
    const weeks = ["2024-01-01T00:00:00Z", "2024-03-04T00:00:00Z"];
    return route.fulfill({ json: { events: outOfOrder ? [event("late", null)] : weeks.map((time) => event("-e", time)), more: false } });
  });
  const sent = [];
  await page.route("**/v1/dead/redrive", (route) => {
    const body = route.request().postDataJSON();
    sent.push(body);
    return route.fulfill({ json: { dry_run: false, more: false, entries: body.ids.map((id) => ({ what: "redrive", id, needs_delivery: false })) } });
  });
  const group = page.locator(".group").first();
  await group.getByRole("button", { name: "Preview a redrive" }).click();
  await group.getByText("2 of 2 would run again").waitFor();
  // A set that is not previewed as asked cannot be sent.
  await group.getByRole("checkbox").check();
  assert.ok(await group.locator("button[type=submit]").isDisabled());
  await group.getByRole("checkbox").uncheck();
  await group.getByText("2 of 2 would run again").waitFor();
  const overtaken = page.waitForResponse((answer) => answer.url().endsWith("/v1/dead/preview"));
  late();
  await overtaken;
  await page.evaluate(() => new Promise((resolve) => { setTimeout(resolve); }));
  await group.getByText("2 of 2 would run again").waitFor();
  // Two entries with one id are told apart by their weeks, and go in two requests.
  const lines = await group.locator(".command code").allInnerTexts();
  assert.equal(lines.length, 2);
  assert.match(lines[1], / dead redrive --scope=\S+ --time=2024-03-04T00:00:00Z --reason=REASON -- '-e'$/);
  await group.getByLabel("Reason, for the audit").fill("mended");
  await group.getByRole("button", { name: "Redrive 2" }).click();
  await page.locator(".work").getByText("Redriven: 2 of 2").waitFor();
  assert.deepEqual(sent.map(({ ids, tokens, out_of_order }) => [ids, tokens["-e"], out_of_order]), [[["-e"], 3, false], [["-e"], 5, false]]);
  await close(page);
});

test("a ledger that is counted for the first time is said to be so, and old counts too", async () => {
  const page = await visit(browser, "about:blank");
  const numbers = { ...(await server.must("GET", "/v1/overview")), age_s: 200, took_s: 40 };
  let asked = 0;
  await page.route("**/v1/overview/live", (route) => {
    asked += 1;
    const body = asked === 1 ? 'event: counting\ndata: {"for_s":75}\n\n' : `event: overview\ndata: ${JSON.stringify(numbers)}\n\n`;
    return asked > 2 ? undefined : route.fulfill({ contentType: "text/event-stream", body });
  });
  await page.goto(`${server.url}/`);
  await page.getByText(/Counting the ledger takes 40 s/).waitFor();
  assert.equal(await page.getByRole("alert").count(), 0);
  await close(page);
});

test("what would have been done twice is on the overview", async () => {
  const page = await open("/");
  await page.getByRole("heading", { name: "Not done twice" }).waitFor();
  await page.getByText(/without hapax \d+ effects would have been done again.*: 2 keyed writes answered with the first answer/).waitFor();
  await close(page);
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
  assert.match(await group.locator("code").innerText(), /dead redrive --scope=mailer --reason='the bank is back' order-1-paid order-3-paid$/);
  await group.getByRole("button", { name: "Redrive 2" }).click();
  await page.locator(".work").getByText("Redriven: 1 of 2, 1 stayed as they were").waitFor();
  await page.locator(".work").getByText(/order-1-paid: .*has changed since/).waitFor();
  await page.screenshot({ path: join(shots, "redrive-done.png"), fullPage: true });
  const dead = (await server.must("GET", "/v1/dead")).entries.map((entry) => entry.id);
  assert.ok(dead.includes("order-1-paid") && dead.includes("order-9-paid") && !dead.includes("order-3-paid"), dead.join());
  const audit = await server.ask("GET", "/v1/audit");
  assert.match(audit.text, /the bank is back/);
  await page.screenshot({ path: join(shots, "redrive-done.png"), fullPage: true });
  await assertFits(page, "what was done");
  await assertAccessible(page, "what was done");
  await page.locator(".work").getByRole("button", { name: "Close" }).click();
  await page.locator(".work").waitFor({ state: "detached" });
  await page.getByRole("link", { name: "order-9-paid" }).waitFor();
  await close(page);
});

test("a redrive of many shows its progress, and what failed on the way", async () => {
  const many = new Server();
  await many.start();
  try {
    for (const reason of ["the printer is jammed", "the carrier is away"]) {
      const ids = Array.from({ length: 120 }, (_, n) => `${reason.split(" ")[1]}-${n}`);
      for (let from = 0; from < ids.length; from += 20) await Promise.all(ids.slice(from, from + 20).map((id) => many.die("mailer", id, reason)));
    }
    const page = await open("/dead", { base: many.url });
    const work = page.locator(".work");
    const group = (reason) => page.locator(".group", { hasText: reason });
    const begin = async (reason, count) => {
      await group(reason).getByRole("button", { name: "Preview a redrive" }).click();
      await group(reason).getByText(`${count} of ${count} would run again`).waitFor();
      await group(reason).getByLabel("Reason, for the audit").fill(`mended: ${reason}`);
      await group(reason).getByRole("button", { name: `Redrive ${count}` }).click();
    };
    // The second request of each redrive is held, or fails.
    let asked = 0, second;
    const held = new Promise((resolve) => { second = resolve; });
    await page.route("**/v1/dead/redrive", async (route) => {
      asked += 1;
      if (asked === 2) await held;
      if (asked === 5) return route.fulfill({ status: 503, contentType: "application/problem+json", json: { status: 503, title: "Unavailable", code: "unavailable", detail: "the ledger is away" } });
      return route.continue();
    });
    await begin("the printer is jammed", 120);
    await work.getByText("Redriving: 50 of 120").waitFor();
    assert.equal(await work.locator("progress").evaluate((bar) => bar.value / bar.max), 50 / 120);
    await assertAccessible(page, "progress");
    await page.screenshot({ path: join(shots, "redrive-progress.png"), fullPage: true });
    second();
    await work.getByText("Redriven: 120 of 120").waitFor();
    assert.equal(asked, 3);
    const rows = async (reason) => (await many.must("GET", "/v1/audit?limit=1000")).rows.filter((row) => row.reason === `mended: ${reason}`).length;
    assert.equal(await rows("the printer is jammed"), 120);
    await work.getByRole("button", { name: "Close" }).click();

    await begin("the carrier is away", 120);
    const alert = work.getByRole("alert");
    await alert.filter({ hasText: "the ledger is away." }).filter({ hasText: "50 of 120 have an answer" }).waitFor();
    await work.getByText("Redriven: 50 of 120").waitFor();
    assert.equal(await rows("the carrier is away"), 50);
    await page.screenshot({ path: join(shots, "redrive-failed.png"), fullPage: true });
    await work.getByRole("button", { name: "Close" }).click();
    // The rest is as it was, and the next preview has it.
    await begin("the carrier is away", 70);
    await work.getByText("Redriven: 70 of 70").waitFor();
    assert.equal(await rows("the carrier is away"), 120);
    page.wrong = page.wrong.filter((said) => !said.includes("503")); // the browser's own line
    await close(page);
  } finally {
    await many.remove();
  }
});

test("T530: a redrive goes on, and is seen, in every view, and nothing else is decided meanwhile", async () => {
  const many = new Server();
  await many.start();
  try {
    for (const [reason, count] of [["the printer is jammed", 120], ["the carrier is away", 1]]) {
      await Promise.all(Array.from({ length: count }, (_, n) => many.die("mailer", `${reason.split(" ")[1]}-${n}`, reason)));
    }
    const page = await open("/dead", { base: many.url });
    const group = (reason) => page.locator(".group", { hasText: reason });
    let asked = 0, go;
    const held = new Promise((resolve) => { go = resolve; });
    await page.route("**/v1/dead/redrive", async (route) => {
      asked += 1;
      if (asked === 2) await held;
      if (asked === 3) return route.fulfill({ status: 503, contentType: "application/problem+json", json: { status: 503, title: "Unavailable", code: "unavailable", detail: "the ledger is away" } });
      return route.continue();
    });
    // A preview that is open when the other one begins.
    await group("the printer is jammed").getByRole("button", { name: "Preview a redrive" }).click();
    await group("the printer is jammed").getByText("120 of 120 would run again").waitFor();
    await group("the printer is jammed").getByLabel("Reason, for the audit").fill("mended");
    await group("the printer is jammed").getByRole("button", { name: "Redrive 120" }).click();
    await page.getByText("Redriving: 50 of 120").waitFor();
    for (const button of await page.getByRole("button", { name: /^Preview a/ }).all()) assert.ok(await button.isDisabled());
    await page.getByRole("link", { name: "Doctor" }).click();
    await page.locator(".findings li").first().waitFor();
    await page.getByText("Redriving: 50 of 120").waitFor();
    await assertFits(page, "progress in another view");
    await assertAccessible(page, "progress in another view");
    await page.screenshot({ path: join(shots, "redrive-elsewhere.png"), fullPage: true });
    // Whoever closes the page now is asked first.
    const dialog = page.waitForEvent("dialog");
    await page.close({ runBeforeUnload: true });
    assert.equal((await dialog).type(), "beforeunload");
    go();
    const alert = page.locator(".work").getByRole("alert");
    await alert.filter({ hasText: "the ledger is away." }).filter({ hasText: "100 of 120 have an answer" }).waitFor();
    await page.getByRole("link", { name: "Dead letters" }).click();
    await group("the printer is jammed").getByText("20", { exact: true }).waitFor();
    await page.getByText("Redriven: 100 of 120").waitFor();
    await page.locator(".work").getByRole("button", { name: "Close" }).click();
    await group("the carrier is away").getByRole("button", { name: "Preview a redrive" }).click();
    await group("the carrier is away").getByText("1 of 1 would run again").waitFor();
    page.wrong = page.wrong.filter((said) => !/503|beforeunload|^dialog $/.test(said)); // the browser's own lines
    await close(page);
  } finally {
    await many.remove();
  }
});

test("what became of a redrive stays, also when nothing of the group is left", async () => {
  const page = await open("/dead");
  const group = page.locator(".group", { hasText: "acme" });
  await group.getByRole("button", { name: "Preview a redrive" }).click();
  await group.getByLabel("Reason, for the audit").fill("mended");
  await group.getByRole("button", { name: "Redrive 1" }).click();
  await page.locator(".work").getByText("Redriven: 1 of 1").waitFor();
  // The list was read again, by itself.
  await group.waitFor({ state: "detached" });
  await page.locator(".work").getByText("The audit has a row for each").waitFor();
  await page.locator(".work").getByRole("button", { name: "Close" }).click();
  await page.locator(".work").waitFor({ state: "detached" });
  await close(page);
});

test("an aggregate is resumed as previewed", async () => {
  const page = await open("/aggregates");
  const group = page.locator(".group", { has: page.getByRole("link", { name: "order-1", exact: true }) });
  await group.getByRole("button", { name: "Preview a skip" }).click();
  await group.getByText("1 of 1 would let their aggregate go on").waitFor();
  await group.getByRole("button", { name: "Preview a resume" }).click();
  await group.getByText("1 of 1 would run again").waitFor();
  await assertAccessible(page, "the preview of a resume");
  await assertFits(page, "the preview of a resume");
  await page.screenshot({ path: join(shots, "resume-preview.png"), fullPage: true });
  await group.getByLabel("Reason, for the audit").fill("the bank is back");
  await group.getByRole("button", { name: "Resume 1" }).click();
  await page.locator(".work").getByText("Resumed: 1 of 1").waitFor();
  assert.equal((await server.ask("GET", "/v1/processed?scope=mailer&id=order-1-paid")).json.state, "retry");
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
    page.wrong = page.wrong.filter((said) => !/ERR_|503/.test(said)); // the browser's own lines
    await close(page);
  } finally {
    await other.remove();
  }
});

test("T531: a view that was opened while the server restarts is asked again when it is back", async () => {
  const other = new Server();
  await other.start();
  try {
    await other.die("mailer", "one", "the printer is jammed");
    const page = await open("/", { base: other.url });
    await page.locator(".state", { hasText: "Live" }).waitFor();
    await other.stop("SIGKILL");
    for (const [name, ready] of [["Dead letters", "the printer is jammed"], ["Aggregates", "No aggregate waits."]]) {
      await page.getByRole("link", { name }).click();
      await page.getByRole("heading", { name, exact: true }).waitFor();
      await page.locator("main").getByRole("alert").filter({ hasText: "The server does not answer" }).waitFor();
      await other.start(other.address);
      await page.locator(".state", { hasText: "Live" }).waitFor();
      await page.getByText(ready).first().waitFor();
      assert.equal(await page.getByRole("alert").count(), 0, name);
      if (name === "Dead letters") await other.stop("SIGKILL");
    }
    page.wrong = page.wrong.filter((said) => !/ERR_|503/.test(said)); // the browser's own lines
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
