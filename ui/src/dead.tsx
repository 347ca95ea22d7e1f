// Dead letters by reason, and what can be decided about all that match.
import { useState } from "preact/hooks";
import type { Group } from "./api";
import { Decide } from "./decide";
import { link } from "./event";
import { useLoad } from "./live";
import type { Shown } from "./main";
import { AsOf, Command, Empty, Name, Notice, Time, number } from "./text";
import type { What } from "./work";

interface Groups {
  groups: Group[];
  looked: number;
  more: boolean;
  age_s: number;
}

export function DeadView({ session, live, work }: Shown) {
  // What dies while the page is open appears by itself; a set that was previewed stays as it is.
  const dead = live.samples.at(-1)?.data.scopes.reduce((sum, scope) => sum + (scope.states.dead ?? 0), 0);
  const { data, at, error, loading, again } = useLoad<Groups>(`/v1/dead/groups?all_tenants=${session.whole}`, `${dead}/${work.ended}`);
  // By name: the group itself is another one each time the list is read again.
  const [open, setOpen] = useState<{ group: Group; key: string; what: What } | null>(null);
  const command = session.command ?? "hapax";
  const shown = (data?.groups ?? []).map((group) => ({ group, key: JSON.stringify([group.tenant, group.scope, group.pattern]) }));
  // What was previewed stays to be read, also when the group is gone.
  if (open && !shown.some(({ key }) => key === open.key)) shown.unshift(open);
  return (
    <section>
      <div class="title-row"><h1>Dead letters</h1><AsOf at={at && data && new Date(at.getTime() - data.age_s * 1000)} /></div>
      <p class="lead">Events that failed for good, by reason. Each keeps its bytes until it is redriven or dropped.</p>
      {error && <Notice kind="bad">{error}</Notice>}
      {loading && !data && <p class="loading">Looking…</p>}
      {data?.more && <Notice kind="warn">There are more reasons than are shown.</Notice>}
      {data && shown.length === 0 && (
        <Empty title="There is no dead letter.">
          <p>An event whose handler has failed as often as it may ends here, with its reason. This lists them, once there are some:</p>
          <Command line={`${command} dead ls`} />
        </Empty>
      )}
      {shown.length > 0 && <Command label="Lists them in a terminal" line={`${command} dead ls --by-reason`} />}
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
            <div class="decisions">
              {(["redrive", "drop"] as const).map((what) => {
                const isOpen = open?.key === key && open.what === what;
                return <button key={what} type="button" class="second" onClick={() => setOpen({ group, key, what })} aria-expanded={isOpen} disabled={isOpen || work.running}>Preview a {what}</button>;
              })}
            </div>
            {open?.key === key && <Decide key={open.what} what={open.what} which={group} command={command} work={work} close={() => { setOpen(null); again(); }} />}
          </li>
        ))}
      </ul>
    </section>
  );
}
