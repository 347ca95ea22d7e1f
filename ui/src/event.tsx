// The history of an event, of a keyed write or of an aggregate as a timeline.
import { useState } from "preact/hooks";
import type { Explanation, Step } from "./api";
import { useLoad } from "./live";
import type { Shown } from "./main";
import { AsOf, Command, Empty, Name, Notice, Time, clock, day, flag, pause, visible, words, zone } from "./text";

const KINDS = ["id", "aggregate", "key"] as const;
type Kind = (typeof KINDS)[number];
const NAMES: Record<Kind, string> = { id: "Event id", aggregate: "Aggregate", key: "Key of a write" };

/** A pause that is folded into one row. */
const GAP_MS = 60_000;

export function link(kind: Kind, name: string, tenant: string | null): string {
  const query = new URLSearchParams({ [kind]: name });
  if (tenant !== null) query.set("tenant", tenant);
  return `/event?${query}`;
}

export function EventView({ session, query, go }: Shown) {
  const asked = KINDS.find((kind) => query.get(kind)) ?? null;
  const name = asked && query.get(asked);
  const tenant = query.get("tenant");
  const [kind, setKind] = useState<Kind>(asked ?? "id");
  const [text, setText] = useState(name ?? "");
  const [of, setOf] = useState(tenant ?? "");
  const place = query.toString();
  const [shownPlace, setShownPlace] = useState(place);
  if (shownPlace !== place) {
    // Another link was followed: the form shows what is asked now.
    setShownPlace(place);
    setKind(asked ?? "id");
    setText(name ?? "");
    setOf(tenant ?? "");
  }
  const { data, at, error, loading, again } = useLoad<Explanation>(asked ? `/v1/explain?${place}` : null);
  const search = (event: Event) => {
    event.preventDefault();
    const to = link(kind, text, of === "" ? null : of);
    if (to === `/event?${place}`) again();
    else go(to);
  };
  const command = session.command ?? "hapax";
  return (
    <section>
      <h1>Event</h1>
      <form class="search" onSubmit={search} role="search">
        <label>Search by
          <select value={kind} onChange={(event) => setKind(event.currentTarget.value as Kind)}>
            {KINDS.map((kind) => <option key={kind} value={kind}>{NAMES[kind]}</option>)}
          </select>
        </label>
        <label class="grow">{NAMES[kind]}
          <input type="search" required maxLength={255} value={text} spellcheck={false} autocomplete="off" onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        {session.whole && (
          <label>Tenant
            <input value={of} maxLength={255} placeholder="none" spellcheck={false} autocomplete="off" onInput={(event) => setOf(event.currentTarget.value)} />
          </label>
        )}
        <button type="submit">Search</button>
      </form>
      {asked && name && (
        <Command label="On the command line"
          line={`${command} explain${tenant ? flag("tenant", tenant) : ""}${asked === "id" ? words([name]) : flag(asked, name)}`} />
      )}
      {loading && !data && <p class="loading">Asking the stores…</p>}
      {error && <Notice kind="bad">{error}</Notice>}
      {!asked && (
        <Empty title="What happened to an event?">
          <p>Search for its id, for the aggregate it belongs to, or for the key of the write that made it. The dead letters and the aggregates link here, too.</p>
          <Command label="Lists events" line={`${command} journal read --limit 10`} />
        </Empty>
      )}
      {data && asked && <Timeline explanation={data} at={at} />}
    </section>
  );
}

function Timeline({ explanation, at }: { explanation: Explanation; at: Date | null }) {
  const name = explanation.of.event ?? explanation.of.key ?? explanation.of.aggregate ?? "";
  const kind = Object.keys(explanation.of)[0] ?? "event";
  let before: number | null = null;
  let shownDay = "";
  const rows: preact.JSX.Element[] = [];
  explanation.steps.forEach((step, index) => {
    const time = step.at ? new Date(step.at) : null;
    if (time && before !== null && time.getTime() - before >= GAP_MS) {
      rows.push(<li key={`gap-${index}`} class="gap"><span>nothing for {pause(time.getTime() - before)}</span></li>);
    }
    if (time && `${day(time)} ${zone(time)}` !== shownDay) {
      shownDay = `${day(time)} ${zone(time)}`; // clocks may be changed within a day
      rows.push(<li key={`day-${index}`} class="day number">{shownDay}</li>);
    }
    if (time) before = time.getTime();
    rows.push(<Row key={index} step={step} time={time} withEvent={explanation.of.event === undefined} subject={explanation.of.aggregate} tenant={explanation.tenant} />);
  });
  return (
    <>
      <div class="title-row">
        <h2 class="subject">{kind} <Name of={name} />{explanation.tenant !== null && <> of tenant <Name of={explanation.tenant} /></>}</h2>
        <AsOf at={at} />
      </div>
      {explanation.scopes.length > 0 && <ul class="plain">{explanation.scopes.map((queue) => <li key={queue.scope}><strong><Name of={queue.scope} /></strong>: {queue.what}</li>)}</ul>}
      <ol class="timeline">{rows}</ol>
      <p class="small">A step without a time says how it stands now.</p>
      {explanation.stores.length > 0 && (
        <><h2>What stores say</h2><ul class="plain">
          {explanation.stores.map((store, index) => <li key={index} class={store.unreachable ? "alarm" : ""}>{store.store}: {visible(store.message)}</li>)}
        </ul></>
      )}
      <p class="small">{explanation.not_recorded}</p>
    </>
  );
}

interface RowProps {
  step: Step;
  time: Date | null;
  /** Whether the steps are of several events. */
  withEvent: boolean;
  /** The aggregate that all steps are of. */
  subject: string | undefined;
  tenant: string | null;
}

/** A time as the server writes it. */
const STAMP = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/;

/** What a step says besides its sentence. A time is that of this browser's zone, as all others on the page. */
function Fact({ name, value, tenant }: { name: string; value: string; tenant: string | null }) {
  if (name === "aggregate") return <a href={link("aggregate", value, tenant)}><Name of={value} /></a>;
  if (STAMP.test(value) && /(_at|_until)$/.test(name)) return <Time at={value} />;
  return <Name of={value} />;
}

function Row({ step, time, withEvent, subject, tenant }: RowProps) {
  const facts = Object.entries(step.facts).filter(([name, value]) => name !== "aggregate" || value !== subject);
  return (
    <li class={`step ${step.layer}`}>
      <span class="at number">{time ? <time dateTime={step.at!}>{clock(time, true)}</time> : <span class="zero">–</span>}</span>
      <span class="where">{step.layer.replace("_", " ")}{step.name !== null && step.name !== step.layer && <> <Name of={step.name} /></>}</span>
      <div class="what">
        <p>{visible(step.what)}</p>
        {(facts.length > 0 || withEvent) && (
          <dl class="facts">
            {withEvent && step.event !== null && <div><dt>event</dt><dd><a href={link("id", step.event, tenant)}><Name of={step.event} /></a></dd></div>}
            {facts.map(([name, value]) => (
              <div key={name}>
                <dt>{name.replaceAll("_", " ")}</dt>
                <dd><Fact name={name} value={String(value)} tenant={tenant} /></dd>
              </div>
            ))}
          </dl>
        )}
      </div>
    </li>
  );
}
