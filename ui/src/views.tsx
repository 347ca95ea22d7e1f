// Aggregates that wait, what is kept for how long, and the checks.
import { useState } from "preact/hooks";
import type { Doctor, Retention, Waiting } from "./api";
import { Decide } from "./decide";
import { link } from "./event";
import { useLoad } from "./live";
import type { Shown } from "./main";
import { AsOf, Command, Empty, Name, Notice, Time, Sentence, flag, number, ofTenant, pause, size } from "./text";
import type { What } from "./work";

const SEQS_SHOWN = 8;

export function AggregatesView({ session, live, work }: Shown) {
  const open = live.samples.at(-1)?.data.scopes.map((scope) => `${scope.states.parked ?? 0}/${scope.states.dead ?? 0}/${scope.states.retry ?? 0}`).join();
  const { data, at, error, loading, again } = useLoad<{ aggregates: Waiting[]; more: boolean; age_s: number }>(`/v1/waiting?all_tenants=${session.whole}`, `${open}/${work.ended}`);
  const [decides, setDecides] = useState<{ of: Waiting; key: string; what: What } | null>(null);
  const command = session.command ?? "hapax";
  const shown = (data?.aggregates ?? []).map((of) => ({ of, key: JSON.stringify([of.tenant, of.scope, of.aggregate]) }));
  // What was previewed stays to be read, also when it waits no more.
  if (decides && !shown.some(({ key }) => key === decides.key)) shown.unshift(decides);
  return (
    <section>
      <div class="title-row"><h1>Aggregates</h1><AsOf at={at && data && new Date(at.getTime() - data.age_s * 1000)} /></div>
      <p class="lead">Events of an aggregate take effect in the order of their seq. These have one that is not settled, and what is parked waits behind it.</p>
      {error && <Notice kind="bad">{error}</Notice>}
      {loading && !data && <p class="loading">Looking…</p>}
      {data?.more && <Notice kind="warn">There are more than are shown.</Notice>}
      {data && shown.length === 0 && (
        <Empty title="No aggregate waits.">
          <p>An event that comes after one that failed is parked until that is resolved. Any aggregate can be looked at, also one that does not wait:</p>
          <Command line={`${command} explain --aggregate order-17`} />
        </Empty>
      )}
      {shown.length > 0 && <Command label="Lists what is parked" line={`${command} parked ls`} />}
      <ul class="groups">
        {shown.map(({ of, key }) => (
          <li key={key} class="group">
            <p class="figure"><span class="number">{number(of.waiting.length)}</span> <span class="unit">parked</span></p>
            <div class="about">
              <h2 class="reason"><a href={link("aggregate", of.aggregate, of.tenant)}><Name of={of.aggregate} /></a></h2>
              <p>{of.what}</p>
              <dl class="facts">
                <div><dt>scope</dt><dd><Name of={of.scope} /></dd></div>
                {of.tenant !== null && <div><dt>tenant</dt><dd><Name of={of.tenant} /></dd></div>}
                <div><dt>last seq in the journal</dt><dd class="number">{of.last_seq ?? "not there"}</dd></div>
                <div><dt>done up to</dt><dd class="number">{of.done_up_to ?? "nothing"}</dd></div>
                {of.head !== null && <div><dt>first open</dt><dd class="number">{of.head} ({of.head_state})</dd></div>}
              </dl>
              {of.waiting.length > 0 && (
                <ol class="queue" aria-label="What waits behind what">
                  <li class="head">{of.head !== null && of.head < of.waiting[0] ? `${of.head} ${of.head_state}` : "missing"}</li>
                  {of.waiting.slice(0, SEQS_SHOWN).map((seq) => <li key={seq}>{seq}</li>)}
                  {of.waiting.length > SEQS_SHOWN && <li class="rest">{number(of.waiting.length - SEQS_SHOWN)} more</li>}
                </ol>
              )}
              {of.waiting.length > 0 && (
                <Command label="Runs what they wait behind again"
                  line={`${command} parked resume${flag("scope", of.scope)}${ofTenant(of.tenant)}${flag("aggregate", of.aggregate)} --all --reason=REASON`} />
              )}
            </div>
            {of.waiting.length > 0 && (
              <div class="decisions">
                {(["resume", "skip"] as const).map((what) => {
                  const isOpen = decides?.key === key && decides.what === what;
                  return <button key={what} type="button" class="second" onClick={() => setDecides({ of, key, what })} aria-expanded={isOpen} disabled={isOpen || work.running}>Preview a {what}</button>;
                })}
              </div>
            )}
            {decides?.key === key && (
              <Decide key={decides.what} what={decides.what} which={{ scope: of.scope, tenant: of.tenant, aggregate: of.aggregate }} command={command} work={work}
                close={() => { setDecides(null); again(); }} />
            )}
          </li>
        ))}
      </ul>
    </section>
  );
}

export function RetentionView({ session }: Shown) {
  const { data, at, error, loading, again } = useLoad<Retention>("/v1/retention");
  const command = session.command ?? "hapax";
  const most = Math.max(1, ...(data?.weeks ?? []).map((week) => week.entries));
  const bytes = data?.weeks.reduce<number | null>((sum, week) => (sum === null || week.bytes === null ? null : sum + week.bytes), 0) ?? null;
  return (
    <section>
      <div class="title-row"><h1>Retention</h1><AsOf at={at && data && new Date(at.getTime() - data.age_s * 1000)} /></div>
      <p class="lead">The ledger forgets by weeks: a week goes once it and everything settled in it are older than the retention. What is open stays.</p>
      {error && <Notice kind="bad">{error}</Notice>}
      {loading && !data && <p class="loading">Counting…</p>}
      {data && (
        <>
          <dl class="cards">
            <div><dt>Entries kept after they are settled</dt><dd>{pause(data.ledger_retention_s * 1000)}</dd></div>
            <div><dt>Answers of keyed writes kept</dt><dd>{pause(data.key_retention_s * 1000)}</dd></div>
            <div><dt>Audit rows kept</dt><dd>{pause(data.audit_retention_s * 1000)}</dd></div>
            <div><dt>Entries in the ledger</dt><dd class="number">{number(data.entries)}</dd></div>
            <div><dt>Of them held with their bytes</dt><dd class="number">{number(data.held)}</dd></div>
            <div><dt>A sweep would remove now</dt><dd class="number">{number(data.sweep_removes)}</dd></div>
            <div><dt>Keys last swept</dt><dd>{data.keys_swept_at ? <Time at={data.keys_swept_at} /> : "not yet"}</dd></div>
            <div><dt>Oldest event of the journal</dt><dd>{data.journal_oldest_at ? <Time at={data.journal_oldest_at} /> : "there is none"}</dd></div>
          </dl>
          {data.sweep_paused_until && <Notice kind="warn">The ledger's clock leapt: nothing is removed before <Time at={data.sweep_paused_until} />.</Notice>}
          <h2>Weeks {bytes !== null && <span class="unit">{size(bytes)} on disk</span>}</h2>
          {data.weeks.length === 0 ? (
            <Empty title="The ledger has no week yet.">
              <p>Events whose id is a UUIDv7 are stored in the week of its time. This makes such ids:</p>
              <Command line="hapax id make" />
            </Empty>
          ) : (
            <div class="table" tabIndex={0} role="region" aria-label="Weeks">
              <table>
                <thead><tr><th scope="col">Week of</th><th scope="col" class="right">Entries</th><th scope="col" class="right">On disk</th><th scope="col"><span class="sr">Share</span></th><th scope="col">Ends</th><th scope="col">Goes after</th><th scope="col" class="right">A sweep would remove</th></tr></thead>
                <tbody>
                  {data.weeks.map((week) => (
                    <tr key={week.week}>
                      <th scope="row" class="number">{week.week}</th>
                      <td class={`number right${week.entries === 0 ? " zero" : ""}`}>{number(week.entries)}</td>
                      <td class="number right">{week.bytes === null ? <span class="zero">unknown</span> : size(week.bytes)}</td>
                      <td class="share"><meter min={0} max={most} value={week.entries} aria-label={`Entries of the week of ${week.week}`} /></td>
                      <td>{week.ends_at ? <Time at={week.ends_at} /> : "–"}</td>
                      <td>{week.drops_after ? <Time at={week.drops_after} /> : "entries go one by one"}</td>
                      <td class="number right">{week.removes === null ? <span class="zero">stays</span> : number(week.removes)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          )}
          {data.dropped.length > 0 && (
            <><h2>Dropped</h2><ul class="plain">{data.dropped.map((week) => <li key={week.week}>week of {week.week}, on <Time at={week.dropped_at} /></li>)}</ul></>
          )}
          <div class="buttons"><button type="button" class="second" onClick={again}>Look again</button></div>
          <Command line={`${command} ledger sweep --dry-run`} />
        </>
      )}
    </section>
  );
}

const WORST = ["refusal", "unreachable", "warning", "fine"];
const KIND: Record<string, string> = { fine: "good", warning: "warn", refusal: "bad", unreachable: "bad" };

export function DoctorView({ session }: Shown) {
  const { data, at, error, loading, again } = useLoad<Doctor>("/v1/doctor");
  const findings = [...(data?.findings ?? [])].sort((a, b) => WORST.indexOf(a.level) - WORST.indexOf(b.level));
  return (
    <section>
      <div class="title-row"><h1>Doctor</h1><AsOf at={at} /></div>
      <p class="lead">Whether everything the guarantees rest on is as it must be.</p>
      {error && <Notice kind="bad">{error}</Notice>}
      {loading && !data && <p class="loading">Checking…</p>}
      <ul class="findings">
        {findings.map((finding, index) => (
          <li key={index}>
            <span class={`badge ${KIND[finding.level]}`}>{finding.level}</span>
            <strong>{finding.check}</strong>
            <span class="message"><Sentence of={finding.message} /></span>
          </li>
        ))}
      </ul>
      <div class="buttons"><button type="button" class="second" onClick={again} disabled={loading}>Check again</button></div>
      <Command line={`${session.command ?? "hapax"} doctor`} />
    </section>
  );
}
