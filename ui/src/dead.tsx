// Dead letters by reason, and the redrive of all that match: first what it would do, then the same set and no other.
import { useEffect, useState } from "preact/hooks";
import { post, type Group, type Previewed } from "./api";
import { link } from "./event";
import { useLoad } from "./live";
import type { Shown } from "./main";
import { AsOf, Command, Empty, Name, Notice, Time, number, quoted } from "./text";

interface Groups {
  groups: Group[];
  looked: number;
  more: boolean;
}

/** How many events one request redrives, so that there is progress to see. */
const CHUNK = 50;

export function DeadView({ session, live }: Shown) {
  // What dies while the page is open appears by itself; a set that was previewed stays as it is.
  const dead = live.samples.at(-1)?.data.scopes.reduce((sum, scope) => sum + (scope.states.dead ?? 0), 0);
  const { data, at, error, loading, again } = useLoad<Groups>(`/v1/dead/groups?all_tenants=${session.whole}`, dead);
  // By name: the group itself is another one each time the list is read again.
  const [open, setOpen] = useState<{ group: Group; key: string } | null>(null);
  const command = session.command ?? "hapax";
  const shown = (data?.groups ?? []).map((group) => ({ group, key: JSON.stringify([group.tenant, group.scope, group.pattern]) }));
  // Once all of it was redriven the group is gone, but what became of it is still to be read.
  if (open && !shown.some(({ key }) => key === open.key)) shown.unshift(open);
  return (
    <section>
      <div class="title-row"><h1>Dead letters</h1><AsOf at={at} /></div>
      <p class="lead">Events that failed for good, by reason. Each keeps its bytes until it is redriven or dropped.</p>
      {error && <Notice kind="bad">{error}</Notice>}
      {loading && !data && <p class="loading">Looking…</p>}
      {data?.more && <Notice kind="warn">There are more than are shown: {number(data.looked)} were looked at.</Notice>}
      {data && shown.length === 0 && (
        <Empty title="There is no dead letter.">
          <p>An event whose handler has failed as often as it may ends here, with its reason. This lists them, once there are some:</p>
          <Command line={`${command} dead ls`} />
        </Empty>
      )}
      <ul class="groups">
        {shown.map(({ group, key }) => (
          <li key={key} class="group">
            <p class="figure"><span class="number">{number(group.count)}</span></p>
            <div class="about">
              <h2 class="reason"><Name of={group.pattern} /></h2>
              {group.reason !== group.pattern && <p class="small">Latest: <Name of={group.reason} /></p>}
              <dl class="facts">
                <div><dt>scope</dt><dd><Name of={group.scope} /></dd></div>
                {group.tenant !== null && <div><dt>tenant</dt><dd><Name of={group.tenant} /></dd></div>}
                <div><dt>first</dt><dd><Time at={group.first_at} /></dd></div>
                <div><dt>latest</dt><dd><Time at={group.last_at} /></dd></div>
              </dl>
              <ul class="ids">{group.ids.map((id) => <li key={id}><a href={link("id", id, group.tenant)}><Name of={id} /></a></li>)}
                {group.count > group.ids.length && <li class="small">and {number(group.count - group.ids.length)} more</li>}</ul>
            </div>
            <button type="button" class="second" onClick={() => setOpen({ group, key })} aria-expanded={open?.key === key} disabled={open?.key === key}>Preview a redrive</button>
            {open?.key === key && <Redrive group={group} command={command} close={() => { setOpen(null); again(); }} />}
          </li>
        ))}
      </ul>
    </section>
  );
}

interface Done {
  id: string;
  said: string;
  failed: boolean;
}

interface Changed {
  entries: { id: string; needs_delivery: boolean; problem?: { detail: string } }[];
}

function Redrive({ group, command, close }: { group: Group; command: string; close: () => void }) {
  const [outOfOrder, setOutOfOrder] = useState(false);
  const [events, setEvents] = useState<Previewed[] | null>(null);
  const [more, setMore] = useState(false);
  const [reason, setReason] = useState("");
  const [error, setError] = useState<string | null>(null);
  const [done, setDone] = useState<Done[] | null>(null);
  const [running, setRunning] = useState(false);
  const preview = (outOfOrder: boolean) => {
    setError(null);
    const body = { scope: group.scope, tenant: group.tenant ?? undefined, pattern: group.pattern, out_of_order: outOfOrder };
    post<{ events: Previewed[]; more: boolean }>("/v1/dead/preview", body).then(
      (answer) => { setEvents(answer.events); setMore(answer.more); },
      (error) => setError(error.message),
    );
  };
  useEffect(() => preview(false), []);
  const set = events?.filter((event) => event.runs) ?? [];
  const redrive = async (event: Event) => {
    event.preventDefault();
    setRunning(true);
    setError(null);
    const results: Done[] = [];
    setDone([]);
    try {
      for (let from = 0; from < set.length; from += CHUNK) {
        const chunk = set.slice(from, from + CHUNK);
        const answer = await post<Changed>("/v1/dead/redrive", {
          scope: group.scope, tenant: group.tenant ?? undefined, ids: chunk.map((event) => event.id),
          tokens: Object.fromEntries(chunk.map((event) => [event.id, event.token])), reason, out_of_order: outOfOrder,
        });
        for (const entry of answer.entries) {
          const said = entry.problem ? entry.problem.detail : entry.needs_delivery ? "runs when it is delivered again: publish it" : "runs again";
          results.push({ id: entry.id, said, failed: entry.problem !== undefined });
        }
        setDone([...results]);
      }
    } catch (error) {
      setError(`${(error as Error).message.replace(/\.?$/, ".")} ${number(results.length)} of ${number(set.length)} have an answer; preview again to see the rest.`);
    }
    setRunning(false);
  };
  const line = `${command} dead redrive --scope ${quoted(group.scope)}${group.tenant ? ` --tenant ${quoted(group.tenant)}` : ""} --reason ${quoted(reason || "REASON")}${outOfOrder ? " --out-of-order" : ""}${set.some((event) => event.id.startsWith("-")) ? " --" : ""} ${set.map((event) => quoted(event.id)).join(" ")}`;
  const failed = done?.filter((one) => one.failed) ?? [];
  return (
    <div class="panel">
      {error && <Notice kind="bad">{error}</Notice>}
      {!events && !error && <p class="loading">Asking the ledger what would happen…</p>}
      {events && !done && (
        <>
          <p>{number(set.length)} of {number(events.length)} would run again. Exactly these are redriven; what dies from now on is not.
            {more && " More match than one preview shows: redrive these first."}</p>
          <div class="table scroll" tabIndex={0} role="region" aria-label="What a redrive would do">
            <table>
              <thead><tr><th scope="col">Event</th><th scope="col">Aggregate</th><th scope="col" class="right">Seq</th><th scope="col">What would happen</th></tr></thead>
              <tbody>
                {events.map((event) => (
                  <tr key={event.id} class={event.runs ? "" : "muted"}>
                    <th scope="row"><Name of={event.id} /></th>
                    <td>{event.aggregate === null ? "–" : <Name of={event.aggregate} />}</td>
                    <td class="number right">{event.seq ?? "–"}</td>
                    <td>{event.outcome}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          <form onSubmit={redrive} class="act">
            <label class="grow">Reason, for the audit
              <input required maxLength={1000} value={reason} placeholder="fixed in 1.4.2" onInput={(event) => setReason(event.currentTarget.value)} />
            </label>
            <label class="check">
              <input type="checkbox" checked={outOfOrder} onChange={(event) => { setOutOfOrder(event.currentTarget.checked); preview(event.currentTarget.checked); }} />
              also events whose aggregate has moved past them; they run without order
            </label>
            <div class="buttons">
              <button type="submit" disabled={set.length === 0 || running}>Redrive {number(set.length)}</button>
              <button type="button" class="quiet" onClick={close}>Close</button>
            </div>
          </form>
          {set.length > 0 && <Command line={line} />}
        </>
      )}
      {done && (
        <>
          <label>{running ? "Redriving" : "Redriven"}: {number(done.length - failed.length)} of {number(set.length)}{failed.length > 0 && `, ${number(failed.length)} stayed as they were`}
            <progress max={set.length} value={done.length} />
          </label>
          {failed.length > 0 && <ul class="plain">{failed.map((one) => <li key={one.id}><Name of={one.id} />: {one.said}</li>)}</ul>}
          {!running && <><p role="status">The audit has a row for each{error && " of these"}, with your reason.</p><button type="button" onClick={close}>Close</button></>}
        </>
      )}
    </div>
  );
}
