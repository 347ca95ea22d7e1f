// Text from outside, numbers and times. Text is only ever a text node; what cannot be seen is shown as an escape.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

// Controls, marks that change the direction, and what has no width: those that `Visible` in src/id.rs hides. A test compares.
const HIDDEN = /[\u{0}-\u{1f}\u{7f}-\u{9f}\u{ad}\u{61c}\u{180e}\u{200b}-\u{200f}\u{2028}-\u{202e}\u{2060}-\u{206f}\u{feff}\u{fff9}-\u{fffb}\u{e0000}-\u{e0fff}]/gu;

export function visible(text: string): string {
  return text.replace(HIDDEN, (c) => `\\u{${c.codePointAt(0)!.toString(16)}}`);
}

/** A name from outside: it keeps its own direction, and breaks anywhere. */
export function Name({ of }: { of: string }) {
  return <bdi class="name">{visible(of)}</bdi>;
}

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function number(value: number): string {
  return plain.format(value);
}

/** A number per second. */
export function perSecond(value: number | null): string {
  return value === null ? "–" : `${rate(value)}/s`;
}

export function rate(value: number | null): string {
  if (value === null) return "–";
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(1) : plain.format(value);
}

/** Bytes in the largest unit that leaves a number before the point. */
export function size(bytes: number): string {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; bytes >= 1000 && at < units.length - 1; at += 1) bytes /= 1000;
  return `${at === 0 || bytes >= 100 ? plain.format(bytes) : bytes.toFixed(1)} ${units[at]}`;
}

const pad = (value: number, digits = 2) => String(value).padStart(digits, "0");

/** The zone of this browser as an offset. */
export function zone(at: Date): string {
  const minutes = -at.getTimezoneOffset();
  if (minutes === 0) return "UTC";
  const size = Math.abs(minutes);
  return `UTC${minutes < 0 ? "−" : "+"}${pad(Math.floor(size / 60))}:${pad(size % 60)}`;
}

export function clock(at: Date, millis = false): string {
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  return millis ? `${time}.${pad(at.getMilliseconds(), 3)}` : time;
}

export function day(at: Date): string {
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
}

export function Time({ at }: { at: string }) {
  const date = new Date(at);
  if (Number.isNaN(date.getTime())) return <span>{visible(at)}</span>;
  return <time dateTime={at} class="number">{day(date)} {clock(date)} <span class="zone">{zone(date)}</span></time>;
}

/** A sentence of ours, with the commands in it that stand between backquotes. */
export function Sentence({ of }: { of: string }) {
  return <>{of.split("`").map((part, index) => (index % 2 === 1 ? <code key={index}>{visible(part)}</code> : visible(part)))}</>;
}

/** A pause in its two largest units: `3 h 12 min`. */
export function pause(ms: number): string {
  let seconds = Math.floor(ms / 1000);
  const parts: string[] = [];
  for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]] as const) {
    const count = Math.floor(seconds / unit);
    if (count > 0 || (unit === 1 && parts.length === 0)) parts.push(`${count} ${name}`);
    else if (parts.length > 0) break;
    if (parts.length === 2) break;
    seconds %= unit;
  }
  return parts.join(" ");
}

export function AsOf({ at }: { at: Date | null }) {
  if (!at) return <span class="as-of">No data yet</span>;
  return (
    <span class="as-of">
      Data as of <time dateTime={at.toISOString()} class="number">{clock(at)}</time> {zone(at)}
    </span>
  );
}

/** A word for a shell. */
export function quoted(text: string): string {
  if (/^[A-Za-z0-9._\/:@,+=-]+$/.test(text) && !text.startsWith("-")) return text;
  // What a terminal would act upon is written as an escape.
  if (text.search(HIDDEN) >= 0) {
    const inner = text.replace(/[\\']/g, (c) => `\\${c}`);
    return `$'${inner.replace(HIDDEN, (c) => `\\U${c.codePointAt(0)!.toString(16).padStart(8, "0")}`)}'`;
  }
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** An option of a command. A value may begin with a hyphen. */
export function flag(name: string, value: string): string {
  return ` --${name}=${quoted(value)}`;
}

/** Whose data. Without an option some commands mean those of all tenants. */
export function ofTenant(tenant: string | null): string {
  return tenant === null ? " --no-tenant" : flag("tenant", tenant);
}

/** The names at the end of a command. */
export function words(names: string[]): string {
  return `${names.some((name) => name.startsWith("-")) ? " --" : ""} ${names.map(quoted).join(" ")}`;
}

/** A longer word may be broken. */
const WORD_MAX = 24;

/** The command that does the same. */
export function Command({ line, label = "On the command line" }: { line: string; label?: string }) {
  const [copied, setCopied] = useState("");
  const copy = () =>
    navigator.clipboard.writeText(line).then(() => setCopied("Copied"), () => setCopied("Select the text to copy it"));
  return (
    <div class="command">
      <span class="command-label">{label}</span>
      <code tabIndex={0}>{line.split(/( )/).map((word, at) => (word.length > 1 && word.length <= WORD_MAX ? <span key={at}>{word}</span> : word))}</code>
      <button type="button" class="quiet" onClick={copy} aria-label={`Copy the command: ${label}`}>Copy</button>
      <span role="status" class="copied">{copied}</span>
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="empty-title">{title}</p>
      {children}
    </div>
  );
}

export function Notice({ kind, children }: { kind: "bad" | "warn" | "good"; children: ComponentChildren }) {
  return <div class={`notice ${kind}`} role={kind === "bad" ? "alert" : "status"}>{children}</div>;
}
