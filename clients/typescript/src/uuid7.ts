// UUIDv7 that only increase within a process.

/** Random numbers of 32 bits, drawn many at once: a draw costs more than an id. */
const pool = new Uint32Array(1024);
let used = pool.length;

function random32(): number {
  if (used === pool.length) {
    crypto.getRandomValues(pool);
    used = 0;
  }
  return pool[used++] ?? 0;
}

/**
 * Makes UUIDv7: 48 bits are the time in milliseconds, 6 are the same in all, 74 are random. Within a millisecond,
 * and while the clock goes back, the 74 bits rise by a random step. If they would overflow, the time rises by a
 * millisecond instead.
 */
export class Uuid7Maker {
  #ms = -1;
  // The 74 bits, from the highest on: 12, 30 and 32.
  #high = 0;
  #middle = 0;
  #low = 0;
  readonly #clock: () => number;

  constructor(clock: () => number = Date.now) {
    this.#clock = clock;
  }

  /** The next one: greater than all before. */
  make(): string {
    const now = Math.max(0, Math.min(Math.floor(this.#clock()), 2 ** 48 - 1));
    if (now > this.#ms) this.#draw(now);
    else this.#step(1 + random32());
    const time = this.#ms.toString(16).padStart(12, "0");
    const middle = (0x8000_0000 + this.#middle).toString(16); // the variant's two bits and 30 more
    const low = this.#low.toString(16).padStart(8, "0");
    const high = this.#high.toString(16).padStart(3, "0");
    return `${time.slice(0, 8)}-${time.slice(8)}-7${high}-${middle.slice(0, 4)}-${middle.slice(4)}${low}`;
  }

  #draw(ms: number): void {
    this.#ms = ms;
    this.#high = random32() >>> 20;
    this.#middle = random32() >>> 2;
    this.#low = random32();
  }

  #step(by: number): void {
    this.#low += by;
    if (this.#low < 2 ** 32) return;
    this.#low -= 2 ** 32;
    this.#middle += 1;
    if (this.#middle < 2 ** 30) return;
    this.#middle = 0;
    this.#high += 1;
    if (this.#high === 2 ** 12) this.#draw(this.#ms + 1);
  }
}

const maker = new Uuid7Maker();

/** A new UUIDv7, greater than all that this process has made. */
export function uuid7(): string {
  return maker.make();
}
