// A TypeScript program against the package's types: it is compiled strictly, and run.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { copyFileSync, mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { PATIENCE_MS, Server } from "./support.mjs";

test("a block with `await using` keeps its lease, and has failed if it ends without done", async () => {
  const here = dirname(fileURLToPath(import.meta.url));
  const dir = join(here, "compiled");
  mkdirSync(dir, { recursive: true });
  copyFileSync(join(here, "await_using.ts"), join(dir, "await_using.ts"));
  writeFileSync(join(dir, "package.json"), '{"type": "module"}');
  const compilerOptions = { strict: true, target: "ES2022", module: "NodeNext", lib: ["ES2022", "ESNext.Disposable", "DOM"], types: [] };
  writeFileSync(join(dir, "tsconfig.json"), JSON.stringify({ compilerOptions, files: ["await_using.ts"] }));
  const tsc = process.env.HAPAX_TEST_TSC ?? "tsc";
  execFileSync(tsc, ["-p", dir], { stdio: "inherit", timeout: PATIENCE_MS });
  const server = await Server.start();
  try {
    const said = execFileSync(process.execPath, [join(dir, "await_using.js"), server.url], { encoding: "utf8", timeout: PATIENCE_MS });
    assert.deepEqual(JSON.parse(said), {
      amount: 8,
      first: "token number",
      again: "duplicate",
      failed: "Error: no stock",
      later: "retry_later",
    });
  } finally {
    await server.stop();
  }
});
