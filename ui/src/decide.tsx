// A decision about events: first what it would do to each, then the same set and no other.
import { useEffect, useRef, useState } from "preact/hooks";
import { post, type Previewed } from "./api";
import { Command, Name, Notice, flag, number, ofTenant, words } from "./text";
import type { What, Work } from "./work";

interface Words {
  /** What happens to those that change. */
  would: string;
  does: string;
  command: string;
}

const WORDS: Record<What, Words> = {
  redrive: { would: "would run again", does: "Redrive", command: "dead redrive" },
  drop: { would: "would be given up", does: "Drop", command: "dead drop" },
  resume: { would: "would run again", does: "Resume", command: "parked resume" },
  skip: { would: "would let their aggregate go on", does: "Skip", command: "parked skip" },
};

/** How many of those that match one preview has at most, more or less a page. */
const PREVIEWED_MAX = 20_000;
/** How many previewed events are rows of the table, and how many ids a command names. */
const ROWS_MAX = 1000;
const IDS_MAX = 200;

/** Whose events, and which. */
export interface Which {
  scope: string;
  tenant: string | null;
  pattern?: string;
  aggregate?: string;
}

/** What was previewed, and how. */
interface Preview {
  outOfOrder: boolean;
  events: Previewed[];
  more: boolean;
}

/** The commands that do the same: one for each week where ids are of a week. Very many are named by what they have in common. */
function lines(what: What, which: Which, { events, outOfOrder }: Preview, command: string, reason: string): string[] {
  if (events.length > IDS_MAX) {
    const of = `${flag("scope", which.scope)}${ofTenant(which.tenant)}${which.aggregate === undefined ? "" : flag("aggregate", which.aggregate)}${which.pattern === undefined ? "" : flag("pattern", which.pattern)}`;
    return [`${command} ${WORDS[what].command}${of}${flag("reason", reason || "REASON")}${outOfOrder ? " --out-of-order" : ""} --all`];
  }
  const times = new Map<string | null, string[]>();
  for (const event of events) times.set(event.time, [...(times.get(event.time) ?? []), event.id]);
  return [...times].map(([time, ids]) => {
    const tenant = which.tenant === null ? "" : flag("tenant", which.tenant);
    const options = `${flag("scope", which.scope)}${tenant}${time === null ? "" : flag("time", time)}${flag("reason", reason || "REASON")}`;
    return `${command} ${WORDS[what].command}${options}${outOfOrder ? " --out-of-order" : ""}${words(ids)}`;
  });
}

interface Props {
  what: What;
  which: Which;
  command: string;
  work: Work;
  close: () => void;
}

export function Decide({ what, which, command, work, close }: Props) {
  const [outOfOrder, setOutOfOrder] = useState(false);
  const [preview, setPreview] = useState<Preview | null>(null);
  const [reason, setReason] = useState("");
  const [error, setError] = useState<string | null>(null);
  const [askedFor, setAskedFor] = useState(0);
  const asked = useRef(0);
  const { would, does } = WORDS[what];
  const of = { scope: which.scope, tenant: which.tenant ?? undefined };
  const ask = (outOfOrder: boolean) => {
    // Answers may overtake each other. What is shown and what is sent are those of the last question.
    const turn = (asked.current += 1);
    const isLast = () => turn === asked.current;
    setOutOfOrder(outOfOrder);
    setPreview(null);
    setError(null);
    const body = { ...of, what, pattern: which.pattern, aggregate: which.aggregate, ...(what === "redrive" ? { out_of_order: outOfOrder } : {}) };
    // All that match, part by part.
    const look = async () => {
      const events: Previewed[] = [];
      for (let after: string | undefined; ; ) {
        setAskedFor(events.length);
        const answer = await post<{ events: Previewed[]; more: boolean; next?: string | null }>("/v1/dead/preview", { ...body, after });
        if (!isLast()) return;
        events.push(...answer.events);
        if (!answer.next || events.length >= PREVIEWED_MAX) return setPreview({ outOfOrder, events, more: answer.more || Boolean(answer.next) });
        after = answer.next;
      }
    };
    look().catch((error) => isLast() && setError(error.message));
  };
  useEffect(() => {
    ask(false);
    return () => { asked.current += 1; };
  }, []);
  const set = preview?.events.filter((event) => event.changes) ?? [];
  const act = (event: Event) => {
    event.preventDefault();
    if (!preview || work.running) return;
    work.begin({ what, which, set, reason, outOfOrder: preview.outOfOrder });
    close();
  };
  return (
    <div class="panel">
      {error && <Notice kind="bad">{error}</Notice>}
      {!preview && !error && <p class="loading" role="status">Asking the ledger what would happen…{askedFor > 0 && ` ${number(askedFor)} so far`}</p>}
      {preview && (
        <>
          <p>{number(set.length)} of {number(preview.events.length)} {would}. It is done to exactly these, and not to what comes from now on.
            {preview.more && " More match than one preview shows: do these first."}</p>
          <Outcomes what={does} events={preview.events} />
        </>
      )}
      <form onSubmit={act} class="act">
        <label class="grow">Reason, for the audit
          <input required maxLength={1000} value={reason} placeholder="fixed in 1.4.2" onInput={(event) => setReason(event.currentTarget.value)} />
        </label>
        {what === "redrive" && (
          <label class="check">
            <input type="checkbox" checked={outOfOrder} onChange={(event) => ask(event.currentTarget.checked)} />
            also events whose aggregate has moved past them; they run without order
          </label>
        )}
        <div class="buttons">
          <button type="submit" disabled={set.length === 0 || work.running}>{does} {preview ? number(set.length) : "…"}</button>
          <button type="button" class="quiet" onClick={close}>Close</button>
        </div>
      </form>
      {preview && set.length > 0 && lines(what, which, { ...preview, events: set }, command, reason).map((line) => <Command key={line} line={line} />)}
    </div>
  );
}

function Outcomes({ what, events }: { what: string; events: Previewed[] }) {
  return (
    <div class="table scroll" tabIndex={0} role="region" aria-label={`What would happen: ${what}`}>
      <table>
        <thead><tr><th scope="col">Event</th><th scope="col">Aggregate</th><th scope="col" class="right">Seq</th><th scope="col">What would happen</th></tr></thead>
        <tbody>
          {events.slice(0, ROWS_MAX).map((event) => (
            <tr key={`${event.id}/${event.time}`} class={event.changes ? "" : "muted"}>
              <th scope="row"><Name of={event.id} /></th>
              <td>{event.aggregate === null ? "–" : <Name of={event.aggregate} />}</td>
              <td class="number right">{event.seq ?? "–"}</td>
              <td>{event.outcome}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {events.length > ROWS_MAX && <p class="small">and {number(events.length - ROWS_MAX)} more</p>}
    </div>
  );
}
