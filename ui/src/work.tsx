// A decision that is being carried out, part by part. It lives above the views: it goes on, and is seen, in each of them.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { post, type Previewed } from "./api";
import type { Which } from "./decide";
import { Name, Notice, number, visible } from "./text";

export type What = "redrive" | "drop" | "resume" | "skip";

const WORDS: Record<What, { doing: string; done: string; path: string; body?: Record<string, unknown> }> = {
  redrive: { doing: "Redriving", done: "Redriven", path: "/v1/dead/redrive" },
  drop: { doing: "Dropping", done: "Dropped", path: "/v1/dead/drop" },
  resume: { doing: "Resuming", done: "Resumed", path: "/v1/parked/release", body: { how: "resume" } },
  skip: { doing: "Skipping", done: "Skipped", path: "/v1/parked/release", body: { how: "skip" } },
};

/** How many events one request changes, so that there is progress to see. */
const CHUNK = 50;
/** How many of those that stayed are listed. */
const LISTED_MAX = 1000;

/** What was decided about a previewed set. */
export interface Decision {
  what: What;
  which: Which;
  set: Previewed[];
  reason: string;
  outOfOrder: boolean;
}

interface Progress {
  decision: Decision;
  answered: number;
  stayed: { id: string; why: string }[];
  /** Those that changed, but do not run by themselves. */
  undelivered: string[];
  running: boolean;
  error: string | null;
}

/** The one decision that is carried out, or the last one that was. */
export interface Work {
  progress: Progress | null;
  running: boolean;
  /** How many have ended: lists are read again. */
  ended: number;
  begin: (decision: Decision) => void;
  close: () => void;
}

interface Changed {
  entries: { id: string; needs_delivery: boolean; problem?: { detail: string } }[];
}

/** Parts of a set of which none has an id twice: two entries may have one id, in two weeks. */
function chunks(set: Previewed[]): Previewed[][] {
  const parts: Map<string, Previewed>[] = [];
  for (const event of set) {
    let part = parts.find((part) => part.size < CHUNK && !part.has(event.id));
    if (!part) parts.push(part = new Map());
    part.set(event.id, event);
  }
  return parts.map((part) => [...part.values()]);
}

export function useWork(): Work {
  const [progress, setProgress] = useState<Progress | null>(null);
  const [ended, setEnded] = useState(0);
  const isBusy = useRef(false);
  const running = progress?.running ?? false;
  const begin = useCallback(async (decision: Decision) => {
    // One at a time, also between a click and the next drawing.
    if (isBusy.current) return;
    isBusy.current = true;
    const { what, which, set, reason, outOfOrder } = decision;
    const { path, body } = WORDS[what];
    let now: Progress = { decision, answered: 0, stayed: [], undelivered: [], running: true, error: null };
    setProgress(now);
    try {
      for (const chunk of chunks(set)) {
        const answer = await post<Changed>(path, {
          scope: which.scope, tenant: which.tenant ?? undefined, ...body,
          ids: chunk.map((event) => event.id), tokens: Object.fromEntries(chunk.map((event) => [event.id, event.token])), reason,
          ...(what === "redrive" ? { out_of_order: outOfOrder } : {}),
        });
        const stayed = answer.entries.flatMap(({ id, problem }) => (problem ? [{ id, why: problem.detail }] : []));
        const undelivered = answer.entries.filter((entry) => !entry.problem && entry.needs_delivery).map(({ id }) => id);
        now = {
          ...now, answered: now.answered + answer.entries.length,
          stayed: [...now.stayed, ...stayed], undelivered: [...now.undelivered, ...undelivered],
        };
        setProgress(now);
      }
    } catch (error) {
      const said = (error as Error).message.replace(/\.?$/, ".");
      now = { ...now, error: `${said} ${number(now.answered)} of ${number(set.length)} have an answer; preview again to see the rest.` };
    }
    isBusy.current = false;
    setProgress({ ...now, running: false });
    setEnded((count) => count + 1);
  }, []);
  const close = useCallback(() => setProgress((old) => (old?.running ? old : null)), []);
  useEffect(() => {
    if (!running) return;
    // The rest would stay as it is: the browser asks.
    const leave = (event: BeforeUnloadEvent) => event.preventDefault();
    addEventListener("beforeunload", leave);
    return () => removeEventListener("beforeunload", leave);
  }, [running]);
  return { progress, running, ended, begin, close };
}

/** How far it is, above every view. */
export function WorkBar({ work: { progress, close } }: { work: Work }) {
  const bar = useRef<HTMLElement>(null);
  const decision = progress?.decision;
  // The button that began it is gone.
  useEffect(() => {
    if (decision) bar.current?.focus({ preventScroll: true });
  }, [decision]);
  if (!progress || !decision) return null;
  const { answered, stayed, undelivered, running, error } = progress;
  const { doing, done } = WORDS[decision.what];
  const { scope, tenant, pattern, aggregate } = decision.which;
  return (
    <section class="work" ref={bar} tabIndex={-1} aria-label="What was decided">
      <label>
        <strong>{running ? doing : done}: {number(answered - stayed.length)} of {number(decision.set.length)}</strong>
        {stayed.length > 0 && `, ${number(stayed.length)} stayed as they were`}
        <progress max={decision.set.length} value={answered} />
      </label>
      <p class="small of">scope <Name of={scope} />{tenant !== null && <>, tenant <Name of={tenant} /></>}
        {aggregate !== undefined && <>, aggregate <Name of={aggregate} /></>}{pattern !== undefined && <>: <Name of={pattern} /></>}</p>
      {error && <Notice kind="bad">{error}</Notice>}
      {stayed.length > 0 && (
        <ul class="plain" tabIndex={0} aria-label="What stayed as it was">
          {stayed.slice(0, LISTED_MAX).map((one, at) => <li key={at}><Name of={one.id} />: {visible(one.why)}</li>)}
          {stayed.length > LISTED_MAX && <li class="small">and {number(stayed.length - LISTED_MAX)} more</li>}
        </ul>
      )}
      {undelivered.length > 0 && <p>{number(undelivered.length)} of these run when they are delivered again: publish them.</p>}
      {!running && (
        <div class="end">
          <p role="status">The audit has a row for each{(error || stayed.length > 0) && " that changed"}, with your reason.</p>
          <button type="button" class="quiet" onClick={close}>Close</button>
        </div>
      )}
    </section>
  );
}
