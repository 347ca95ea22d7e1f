// JSON as text: content keeps every digit, whatever a number can hold.

import { Invalid } from "./errors.js";

const NAME_CHARS_MAX = 255;

/** Content that is JSON already. It is sent as it is, to the digit. */
export class RawJson {
  constructor(readonly text: string) {}
}

/** The JSON text of a value. */
export function stringify(what: string, value: unknown): string {
  try {
    if (value instanceof RawJson) {
      JSON.parse(value.text);
      checkSurrogates(what, value.text);
      return value.text;
    }
    const text: string | undefined = JSON.stringify(value, refuseWhatJsonChanges);
    if (text !== undefined) return text;
  } catch (error) {
    if (error instanceof Invalid) throw error;
    throw new Invalid(what, `it is not JSON: ${error instanceof Error ? error.message : error} (RawJson takes any JSON text)`);
  }
  throw new Invalid(what, `it is ${typeof value}, which is not JSON`);
}

/**
 * JSON has no such values, and `JSON.stringify` would write null, `{}` or something else, or leave them out. A member
 * that is undefined is left out, as one that is not there.
 */
function refuseWhatJsonChanges(this: unknown, name: string, value: unknown): unknown {
  const refuse = (message: string): never => {
    throw new TypeError(name === "" ? message : `${JSON.stringify(name)}: ${message}`);
  };
  if (typeof value === "number" && !Number.isFinite(value)) refuse(`${value} is not a JSON number`);
  if (typeof value === "function" || typeof value === "symbol") refuse(`a ${typeof value} is not a JSON value`);
  if (value === undefined && Array.isArray(this)) refuse("undefined cannot be an element of a JSON array");
  if (value === null && (this as Record<string, unknown>)[name] instanceof Date) refuse("it is not a valid date");
  if (value instanceof RawJson) refuse("a RawJson is content of its own, not a part of it");
  const odd = NOT_JSON.find((kind) => value instanceof kind);
  if (odd !== undefined || ArrayBuffer.isView(value)) refuse(`a ${odd?.name ?? "typed array"} is not a JSON value`);
  return value;
}

/** Objects that `JSON.stringify` writes without what they hold. */
const NOT_JSON = [Map, Set, WeakMap, WeakSet, Promise, RegExp, Error, ArrayBuffer] as const;

/** UTF-8 has no half of a surrogate pair: another character would be sent. */
function checkSurrogates(what: string, text: string): void {
  if (/\p{Surrogate}/u.test(text)) throw new Invalid(what, "it has half of a surrogate pair, which is not a character");
}

/** An id or a name: 1 to 255 characters, not blank, no NUL. */
export function checkName(what: string, text: string): string {
  if (typeof text !== "string") throw new Invalid(what, `it is ${typeof text}; it needs to be text`);
  const count = text.length > NAME_CHARS_MAX ? [...text].length : text.length;
  if (count > NAME_CHARS_MAX) throw new Invalid(what, `it has ${count} characters; the limit is ${NAME_CHARS_MAX}`);
  if (text.trim() === "") throw new Invalid(what, `it is blank; it needs 1 to ${NAME_CHARS_MAX} characters`);
  if (text.includes("\0")) throw new Invalid(what, `it has a NUL character at ${text.indexOf("\0")}; NUL is not allowed`);
  checkSurrogates(what, text);
  return text;
}

/** The end of the value that begins at `at`. Brackets are counted, so that depth costs no stack. */
function skip(text: string, at: number): number {
  if (text[at] === '"') return match(/"[^"\\]*(?:\\.[^"\\]*)*"/suy, text, at);
  if (text[at] !== "{" && text[at] !== "[") return match(/[^\s,\]}]+/uy, text, at);
  const bracket = /["{}[\]]/gu;
  let depth = 0;
  for (;;) {
    bracket.lastIndex = at;
    const found = bracket.exec(text);
    if (found === null) throw new SyntaxError("a bracket is not closed");
    at = found.index + 1;
    if (found[0] === '"') at = skip(text, found.index);
    else if (found[0] === "{" || found[0] === "[") depth += 1;
    else if (--depth === 0) return at;
  }
}

function match(pattern: RegExp, text: string, at: number): number {
  pattern.lastIndex = at;
  const found = pattern.exec(text);
  if (found === null) throw new SyntaxError(`there is no JSON value at ${at}`);
  return at + found[0].length;
}

/** The values between two brackets, each as text; of an object, names and values in turn. */
function parts(text: string, opening: string, closing: string): string[] {
  const space = (from: number): number => match(/\s*/uy, text, from);
  let at = space(0);
  if (text[at] !== opening) throw new SyntaxError(`it does not begin with ${opening}`);
  at = space(at + 1);
  const found: string[] = [];
  while (text[at] !== closing) {
    if (at >= text.length) throw new SyntaxError("it ends too early");
    const end = skip(text, at);
    found.push(text.slice(at, end));
    at = space(end);
    if (text[at] === "," || text[at] === ":") at = space(at + 1);
  }
  return found;
}

/** The members of a JSON object, each as text. */
export function members(text: string): Map<string, string> {
  const found = parts(text, "{", "}");
  if (found.length % 2 === 1) throw new SyntaxError("a member has no value");
  const named = new Map<string, string>();
  for (let at = 0; at < found.length; at += 2) named.set(String(JSON.parse(found[at] ?? "")), found[at + 1] ?? "");
  return named;
}

/** The elements of a JSON array, each as text. */
export function elements(text: string): string[] {
  return parts(text, "[", "]");
}

/** A member that must be there. */
export function member(of: Map<string, string>, name: string): string {
  const text = of.get(name);
  if (text === undefined) throw new SyntaxError(`it has no ${name}`);
  return text;
}

/** A whole number that JavaScript holds exactly. */
export function whole(text: string): number {
  const value: unknown = JSON.parse(text);
  if (typeof value !== "number" || !Number.isSafeInteger(value)) throw new SyntaxError(`${text.slice(0, 40)} is not a safe integer`);
  return value;
}

export function base64(bytes: Uint8Array): string {
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

export function unbase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}
