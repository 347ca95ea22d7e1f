// What the page knows of the server: the numbers as they come, and whether it still answers.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { Away, Refused, events, get, type Overview, type Scope } from "./api";

export interface Sample {
  at: number;
  /** When the server counted the ledger for it. One that takes long to count has one count in many samples. */
  countedAt: number;
  data: Overview;
}

/** Numbers that only grow, and those that are as they are, at one time. */
export interface Point {
  at: number;
  countedAt: number;
  done: number;
  appended: number | null;
  published: number | null;
  claims: number | null;
  lag: number | null;
  leased: number;
  retrying: number;
  parked: number;
}

export interface Live {
  /** The latest samples, the oldest first. */
  samples: Sample[];
  /** The latest of them that have a count of their own. */
  counts: Sample[];
  /** What charts draw, for longer. */
  points: Point[];
  /** Since when the server does not answer. */
  lostSince: number | null;
  /** Why it refuses. */
  problem: string | null;
  /** For how many seconds the server has been counting for the first time. */
  counting: number | null;
}

const KEPT = 11;
/** Half an hour of points. */
const POINTS = 900;
/** Numbers come every two seconds; a server that is silent for so long is lost. */
const SILENCE_MS = 10_000;
const AGAIN_MS = 1_500;

export function useLive(enabled: boolean, onUnauthenticated: () => void): Live {
  const [live, setLive] = useState<Live>({ samples: [], counts: [], points: [], lostSince: null, problem: null, counting: null });
  useEffect(() => {
    if (!enabled) return;
    const ended = new AbortController();
    const lost = () => setLive((old) => ({ ...old, lostSince: old.lostSince ?? Date.now() }));
    const listen = async () => {
      while (!ended.signal.aborted) {
        const turn = new AbortController();
        const stop = () => turn.abort();
        ended.signal.addEventListener("abort", stop);
        let watch = setTimeout(stop, SILENCE_MS);
        let pause = 0;
        try {
          for await (const event of events("/v1/overview/live", turn.signal)) {
            clearTimeout(watch);
            watch = setTimeout(stop, SILENCE_MS);
            if (event.name === "overview") {
              const at = Date.now();
              const data = JSON.parse(event.data) as Overview;
              setLive((old) => {
                const same = old.counts.at(-1);
                const countedAt = same?.data.now === data.now ? same.countedAt : at - data.age_s * 1000;
                const sample = { at, countedAt, data };
                return {
                  samples: [...old.samples, sample].slice(-KEPT),
                  counts: same?.countedAt === countedAt ? old.counts : [...old.counts, sample].slice(-KEPT),
                  points: [...old.points, point(sample)].slice(-POINTS),
                  lostSince: null,
                  problem: null,
                  counting: null,
                };
              });
            } else if (event.name === "counting") {
              const counting = JSON.parse(event.data).for_s as number;
              setLive((old) => ({ ...old, lostSince: null, problem: null, counting }));
            } else if (event.name === "problem") {
              const problem = JSON.parse(event.data).detail as string;
              setLive((old) => ({ ...old, lostSince: null, problem }));
            }
          }
        } catch (error) {
          if (ended.signal.aborted) return;
          pause = AGAIN_MS;
          if (error instanceof Refused && error.status === 401) return onUnauthenticated();
          if (error instanceof Refused) {
            const problem = error.message;
            setLive((old) => ({ ...old, lostSince: null, problem }));
          } else lost();
        } finally {
          clearTimeout(watch);
          ended.signal.removeEventListener("abort", stop);
        }
        await new Promise((resolve) => setTimeout(resolve, pause));
      }
    };
    void listen();
    return () => ended.abort();
  }, [enabled]);
  return live;
}

/** How many entries are in some states. */
export function inState(scopes: Scope[], ...states: string[]): number {
  return scopes.reduce((sum, scope) => sum + states.reduce((n, state) => n + (scope.states[state] ?? 0), 0), 0);
}

function point({ at, countedAt, data }: Sample): Point {
  const claims = data.counters?.claims;
  return {
    at,
    countedAt,
    done: inState(data.scopes, "done", "finished"),
    appended: data.journal?.events ?? null,
    published: data.relay?.published ?? null,
    claims: data.counters ? Object.values(claims ?? {}).reduce((sum, count) => sum + count, 0) : null,
    lag: data.bus && data.bus.lag.length > 0 ? Math.max(...data.bus.lag.map((group) => group.records)) : null,
    leased: inState(data.scopes, "leased", "claimed"),
    retrying: inState(data.scopes, "retry"),
    parked: inState(data.scopes, "parked"),
  };
}

/** How fast a number grew at each point, over the few points before it; none where it fell or is unknown. What the
 * ledger counts has the time of its count. */
export function rates(points: Point[], pick: (point: Point) => number | null, time: "at" | "countedAt" = "at"): (number | null)[] {
  return points.map((point, index) => {
    let from = Math.max(0, index - 3);
    while (from > 0 && point[time] - points[from][time] < 500) from -= 1;
    const before = points[from];
    const [value, old, span] = [pick(point), pick(before), point[time] - before[time]];
    if (value === null || old === null || value < old || span < 500) return null;
    return ((value - old) * 1000) / span;
  });
}

/** The same for what the ledger counts: over its counts. */
export function growthOfCount(counts: Sample[], pick: (data: Overview) => number | undefined): number | null {
  return growth(counts, pick, "countedAt");
}

/** How fast a number grows, per second, over the samples; none if it cannot be known. */
export function growth(samples: Sample[], pick: (data: Overview) => number | undefined, time: "at" | "countedAt" = "at"): number | null {
  const last = samples.at(-1);
  const lastValue = last && pick(last.data);
  if (!last || lastValue === undefined) return null;
  // A server that was started again counts from 0.
  let first: { at: number; value: number } | null = null;
  let before = Infinity;
  for (const sample of [...samples].reverse()) {
    const value = pick(sample.data);
    if (value === undefined || value > before) break;
    before = value;
    first = { at: sample[time], value };
  }
  if (!first || last[time] - first.at < 500) return null;
  return ((lastValue - first.value) * 1000) / (last[time] - first.at);
}

export interface Loaded<T> {
  data: T | null;
  at: Date | null;
  error: string | null;
  loading: boolean;
  again: () => void;
}

const RETRY_MS = 3000;
/** What passes by itself: the server says so, or a proxy that finds none. */
const AGAIN = [502, 503, 504];

/** Asks once, and again when `trigger` changes or `again` is called. What is shown stays until there is an answer. */
export function useLoad<T>(path: string | null, trigger?: unknown): Loaded<T> {
  const [state, setState] = useState<Omit<Loaded<T>, "again">>({ data: null, at: null, error: null, loading: path !== null });
  const [turn, setTurn] = useState(0);
  const shown = useRef(path);
  useEffect(() => {
    if (path === null) {
      setState({ data: null, at: null, error: null, loading: false });
      return;
    }
    const abort = new AbortController();
    let retry: number | undefined;
    const kept = shown.current === path;
    shown.current = path;
    setState((old) => ({ ...old, data: kept ? old.data : null, loading: true }));
    get<T>(path, abort.signal).then(
      (data) => setState({ data, at: new Date(), error: null, loading: false }),
      (error) => {
        if (abort.signal.aborted) return;
        setState((old) => ({ ...old, error: error.message, loading: false }));
        // The server restarts; or it is being looked for, or a store is busy.
        if (error instanceof Away || (error instanceof Refused && AGAIN.includes(error.status))) retry = setTimeout(() => setTurn((value) => value + 1), RETRY_MS);
      },
    );
    return () => {
      abort.abort();
      clearTimeout(retry);
    };
  }, [path, trigger, turn]);
  const again = useCallback(() => setTurn((value) => value + 1), []);
  return { ...state, again };
}
