// Bundles src/ into the three files that the binary holds. `node build.mjs DIRECTORY` writes them elsewhere.
import { build } from "esbuild";
import { copyFile, mkdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "../crates/hapax-cli/src/serve/page");
await mkdir(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { page: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  banner: { js: "/* Made from ui/ by ui/build.mjs. It contains Preact (MIT) and uPlot (MIT). */" },
});
await copyFile(join(here, "src/index.html"), join(out, "index.html"));
