// The path of an event as the pipeline it is, with what happens on each stage.
import type { ComponentChildren } from "preact";
import type { Overview, Scope } from "./api";
import { Charts } from "./chart";
import { DemoPanel } from "./demo";
import { growth, growthOfCount, inState, type Sample } from "./live";
import type { Shown } from "./main";
import { Prevented } from "./prevented";
import { AsOf, Command, Empty, Name, Time, number, pause, perSecond, rate } from "./text";

const total = (values: Record<string, number> | undefined) => values && Object.values(values).reduce((a, b) => a + b, 0);

type Level = "good" | "warn" | "bad" | "none";

interface StageProps {
  name: string;
  level: Level;
  figure: string;
  unit: string;
  rows: [string, ComponentChildren][];
  note?: string;
}

function Stage({ name, level, figure, unit, rows, note }: StageProps) {
  const words = { good: "fine", warn: "look here", bad: "needs you", none: "" };
  return (
    <li class={`stage ${level}`}>
      <h2>{name}{words[level] && <span class="sr"> ({words[level]})</span>}</h2>
      <p class="figure"><span class="number">{figure}</span> <span class="unit">{unit}</span></p>
      <dl>
        {rows.map(([term, value]) => (
          <div key={term}><dt>{term}</dt><dd class="number">{value}</dd></div>
        ))}
      </dl>
      {note && <p class="note">{note}</p>}
    </li>
  );
}

/** Rates of each value of a label, those that never happened left out. */
function rates(samples: Sample[], metric: string, data: Overview): [string, string][] {
  return Object.keys(data.counters?.[metric] ?? {}).sort()
    .map((key) => [key.replaceAll("_", " "), perSecond(growth(samples, (data) => data.counters?.[metric]?.[key]))]);
}

const HIDDEN_NOTE = "Counted for all tenants: it needs a token without a tenant.";

function KeyedWrites({ samples, data }: StageData) {
  const speed = growth(samples, (data) => (data.counters ? (total(data.counters.writes) ?? 0) : undefined));
  const rows: [string, ComponentChildren][] = rates(samples, "writes", data).map(([status, value]) => [`answered ${status}`, value]);
  rows.push(["without an answer", data.keys ? number(data.keys.open) : "–"]);
  rows.push(["keys swept", data.keys?.swept_at ? <Time at={data.keys.swept_at} /> : "not yet"]);
  const level = data.keys ? "good" : "bad";
  return <Stage name="Keyed write" level={level} figure={rate(speed)} unit="writes/s" rows={rows}
    note={data.keys ? undefined : "The store of keys does not answer."} />;
}

function JournalStage({ samples, data }: StageData) {
  const { journal } = data;
  if (!journal) return <Stage name="Journal" level="none" figure="–" unit="events" rows={[]} note={HIDDEN_NOTE} />;
  const about = journal.exact ? "" : "≈ ";
  return <Stage name="Journal" level="good" figure={about + number(journal.events)} unit="events" rows={[
    ["appended", perSecond(growth(samples, (data) => data.journal?.events))],
    ["aggregates", about + number(journal.aggregates)],
  ]} />;
}

function RelayStage({ samples, data }: StageData) {
  const { relay, relay_state: state } = data;
  if (state === null) {
    return <Stage name="Relay" level="none" figure="–" unit="" rows={[]} note="It runs elsewhere: hapax relay status says how it is." />;
  }
  if (!relay) return <Stage name="Relay" level={state === "failed" ? "bad" : "good"} figure={state} unit="" rows={[]} note={HIDDEN_NOTE} />;
  const level = state === "failed" || relay.parked > 0 ? "bad" : relay.behind > 0 || relay.lag_s > 10 ? "warn" : "good";
  return <Stage name="Relay" level={level} figure={relay.lag_s.toFixed(1)} unit="s lag" rows={[
    ["role", state],
    ["published", perSecond(growth(samples, (data) => data.relay?.published))],
    ["aggregates behind", number(relay.behind)],
    ["of them parked", number(relay.parked)],
  ]} />;
}

function BusStage({ data }: StageData) {
  const { bus } = data;
  if (!bus) return <Stage name="Bus" level="none" figure="–" unit="" rows={[]} note={data.relay_state === null ? "The relay of this server is off." : HIDDEN_NOTE} />;
  const lag = bus.lag.reduce((most, group) => Math.max(most, group.records), 0);
  const rows: [string, ComponentChildren][] = [["bus", bus.bus], ["topic", <Name of={bus.topic} />]];
  const slow = [...bus.lag].sort((a, b) => b.records - a.records).slice(0, 3);
  rows.push(...slow.map(({ scope, records }): [string, ComponentChildren] => [`lag of ${scope}`, number(records)]));
  return <Stage name="Bus" level={lag > 10_000 ? "warn" : "good"} figure={bus.lag.length > 0 ? number(lag) : "–"} unit="records lag" rows={rows}
    note={bus.lag.length > 0 ? undefined : "No group of a scope has committed here yet."} />;
}

function LedgerStage({ samples, data }: StageData) {
  const speed = growth(samples, (data) => (data.counters ? (total(data.counters.claims) ?? 0) : undefined));
  const window = data.counters?.window;
  const rows: [string, ComponentChildren][] = rates(samples, "claims", data);
  rows.push(["leased", number(inState(data.scopes, "leased"))], ["held with bytes", number(data.scopes.reduce((n, scope) => n + scope.held, 0))]);
  if (window) rows.push(["window hits", `${number(window.hit ?? 0)} of ${number(total(window) ?? 0)}`]);
  return <Stage name="Ledger" level="good" figure={rate(speed)} unit="claims/s" rows={rows}
    note={data.counters ? (window ? undefined : "Claims of this server. Consumers count theirs, and window hits, in their own metrics.") : HIDDEN_NOTE} />;
}

function EffectsStage({ counts, data }: { counts: Sample[]; data: Overview }) {
  const count = (...states: string[]) => inState(data.scopes, ...states);
  const level: Level = count("dead") > 0 ? "bad" : count("lost", "parked") > 0 ? "warn" : "good";
  return <Stage name="Effects" level={level} figure={number(count("done", "finished"))} unit="done" rows={[
    ["now", perSecond(growthOfCount(counts, (data) => inState(data.scopes, "done", "finished")))],
    ["retrying", number(count("retry"))],
    ["parked", <a href="/aggregates">{number(count("parked"))}</a>],
    ["dead letters", <a href="/dead">{number(count("dead"))}</a>],
    ["lost", number(count("lost"))],
  ]} />;
}

function ReadModelStage({ samples, data, now }: StageData & { now: number }) {
  const model = data.read_model;
  if (!model) return <Stage name="Read model" level="none" figure="–" unit="" rows={[]} note="This server has none, or it does not answer: analytics.url names one." />;
  const age = model.last_sync_at ? Math.max(0, now - Date.parse(model.last_sync_at)) : null;
  const rows: [string, ComponentChildren][] = [["last sync", model.last_sync_at ? <Time at={model.last_sync_at} /> : "unknown"]];
  if (model.feed) rows.push(["feed", model.feed]);
  if (data.counters) rows.push(["applied", perSecond(growth(samples, (data) => total(data.counters?.applied)))]);
  if (model.rejected !== null) rows.push(["rejected", number(model.rejected)]);
  return <Stage name="Read model" level={model.rejected ? "bad" : model.stale ? "warn" : "good"}
    figure={age === null ? "–" : age < 10_000 ? (age / 1000).toFixed(1) : pause(age)} unit={age === null ? "" : age < 10_000 ? "s behind" : "behind"} rows={rows} />;
}

interface StageData {
  samples: Sample[];
  data: Overview;
}

/** Older counts are said to be so. */
const OLD_S = 10;

export function OverviewView({ live, session }: Shown) {
  const { samples, counts } = live;
  const last = samples.at(-1);
  return (
    <section>
      <div class="title-row"><h1>Overview</h1><AsOf at={last ? new Date(last.countedAt) : null} /></div>
      <p class="lead">The path of an event. {last && last.data.age_s >= OLD_S && `Counting the ledger takes ${pause(last.data.took_s * 1000)}, so it is counted seldom. `}{samples.length < 2 ? "Rates come with the next numbers." : `Rates are of the last ${Math.round((samples.at(-1)!.at - samples[0].at) / 1000)} seconds.`}</p>
      {session.demo && <DemoPanel tick={last?.at} />}
      {!last ? <p class="loading">{live.counting === null ? "Waiting for the first numbers…" : `The server counts the ledger for the first time, for ${pause(live.counting * 1000)} so far. A large one takes a while.`}</p> : <>
        <ol class="pipeline">
          <KeyedWrites samples={samples} data={last.data} />
          <JournalStage samples={samples} data={last.data} />
          <RelayStage samples={samples} data={last.data} />
          <BusStage samples={samples} data={last.data} />
          <LedgerStage samples={samples} data={last.data} />
          <EffectsStage counts={counts} data={last.data} />
          <ReadModelStage samples={samples} data={last.data} now={last.at} />
        </ol>
        <Charts live={live} />
        <Scopes counts={counts} data={last.data} command={session.command ?? "hapax"} />
        <Prevented data={last.data} />
        <Command label="Counts the ledger in a terminal" line={`${session.command ?? "hapax"} ledger stat`} />
      </>}
    </section>
  );
}

const COLUMNS: [string, string[]][] = [
  ["dead", ["dead"]], ["parked", ["parked"]], ["retry", ["retry"]], ["leased", ["leased", "claimed"]], ["done", ["done", "finished"]], ["lost", ["lost"]], ["stale", ["stale"]],
];

function Scopes({ counts, data, command }: { counts: Sample[]; data: Overview; command: string }) {
  const { scopes } = data;
  if (scopes.length === 0) {
    return (
      <Empty title="No scope has claimed an event yet.">
        <p>A scope is whose effect it is: a handler. This puts events on a topic and runs a handler for each, once:</p>
        <Command label="Publish" line={`${command} produce --topic orders --create 4 samples/events.jsonl`} />
        <Command label="Handle" line={`${command} consume --topic orders --scope mailer --exec 'python3 clients/python/handler.py'`} />
      </Empty>
    );
  }
  const withTenants = scopes.some((scope) => scope.tenant !== null);
  const same = (a: Scope, b: Scope) => a.scope === b.scope && a.tenant === b.tenant;
  return (
    <>
      <h2>Scopes</h2>
      <div class="table" tabIndex={0} role="region" aria-label="Scopes">
        <table>
          <thead>
            <tr>
              {withTenants && <th scope="col">Tenant</th>}
              <th scope="col">Scope</th>
              {COLUMNS.map(([name]) => <th key={name} scope="col" class="right">{name}</th>)}
              <th scope="col" class="right">held</th>
              <th scope="col" class="right">done/s</th>
            </tr>
          </thead>
          <tbody>
            {scopes.map((scope) => (
              <tr key={`${scope.tenant ?? ""}/${scope.scope}`}>
                {withTenants && <td>{scope.tenant === null ? "–" : <Name of={scope.tenant} />}</td>}
                <th scope="row"><Name of={scope.scope} /></th>
                {COLUMNS.map(([name, states]) => {
                  const count = inState([scope], ...states);
                  const alarm = count > 0 && name === "dead" ? " alarm" : "";
                  return <td key={name} class={`number right${count === 0 ? " zero" : ""}${alarm}`}>{number(count)}</td>;
                })}
                <td class={`number right${scope.held === 0 ? " zero" : ""}`}>{number(scope.held)}</td>
                <td class="number right">{rate(growthOfCount(counts, (data) => inState(data.scopes.filter((other) => same(other, scope)), "done", "finished")))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
